"""The combinations of a grid, and how their values are written."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.eval.ablation.grid import build_grid, parse_values
from h2o_prefill.eval.ablation.table import COLUMNS
from h2o_prefill.presets import PRESETS

BASE = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, recall_block=8)


def test_a_grid_is_the_product_of_its_values() -> None:
    axes = {"heavy_budget": [0, 4, 4], "sink_tokens": [0, 2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = build_grid(axes, [64, 32], [BASE, BASE])
    assert grid == [
        (context, BASE.replace(heavy_budget=heavy, sink_tokens=sinks, recall_block=128))
        for context in (64, 32)
        for heavy in (0, 4)
        for sinks in (0, 2)
    ]
    presets = build_grid(
        {"heavy_budget": [64, 128]}, [4096], [PRESETS["h2o"], PRESETS["recommended"]]
    )
    assert [config.recall > 0 for _, config in presets] == [False, False, True, True]


def test_what_cannot_be_run_is_said_once_a_reason() -> None:
    axes = {"chunk_size": [16, 20, 64], "recall": [0, 2], "recall_block": [8]}
    with pytest.warns(UserWarning) as said:
        grid = build_grid({**axes, "heavy_budget": [14]}, [64], [BASE])
    assert [(c.chunk_size, c.recall) for _, c in grid] == [(16, 0), (16, 2), (20, 0)]
    by_block, by_context = (str(warning.message) for warning in said)
    assert by_block.startswith(
        "left out context=64 chunk_size=20 recall=2 recall_block=8 heavy_budget=14: "
    )
    assert "multiple of recall_block" in by_block
    assert by_context.startswith("left out context=64 chunk_size=64 recall=0 recall_block=8 ")
    assert "at least two chunks of 64" in by_context


def test_settings_without_effect_do_not_make_cells() -> None:
    grid = build_grid({"recall": [0, 2], "recall_span": [1, 2]}, [64], [BASE])
    assert [(c.recall, c.recall_span) for _, c in grid] == [(0, 2), (2, 1), (2, 2)]


def test_values_are_read_as_in_a_settings_text() -> None:
    expected: dict[str, tuple[str, list[Any]]] = {
        "chunk_size": ("512, 1024", [512, 1024]),
        "gqa_reduce": ("sum,max", ["sum", "max"]),
        "dense_layers": ("none,0,0+1", [(), (0,), (0, 1)]),
        "min_prefill": ("none,64", [None, 64]),
    }
    assert all(parse_values(name, text) == values for name, (text, values) in expected.items())
    for field in dataclasses.fields(PrefillConfig):
        assert parse_values(field.name, format_value(field.default)) == [field.default]
        assert field.name in COLUMNS
    for name, text in {"chunk_size": "512,", "recall": "many", "dense_layers": "0-3"}.items():
        with pytest.raises(ValueError, match=f"{name} must be .*got "):
            parse_values(name, text)
