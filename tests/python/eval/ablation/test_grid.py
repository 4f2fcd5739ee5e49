"""The combinations of a grid, and how their values are written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation.grid import build_grid, describe, format_value, parse_values
from h2o_prefill.eval.ablation.table import COLUMNS

BASE = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, recall_block=8)


def test_a_grid_is_the_product_of_its_values() -> None:
    grid = build_grid({"heavy_budget": [0, 4, 4], "sink_tokens": [0, 2]}, [64, 32], BASE)
    expected = [
        (context, BASE.replace(heavy_budget=heavy, sink_tokens=sinks, recall_block=128))
        for context in (64, 32)
        for heavy in (0, 4)
        for sinks in (0, 2)
    ]
    assert grid.combinations == expected
    assert grid.refused == []
    assert grid.varied == ("context", "heavy_budget", "sink_tokens")


def test_what_cannot_be_run_is_left_out_with_its_reason() -> None:
    values = {"chunk_size": [16, 20, 64], "recall": [0, 2], "recall_block": [8]}
    grid = build_grid(values, [64], BASE)
    assert [(c.chunk_size, c.recall) for _, c in grid.combinations] == [(16, 0), (16, 2), (20, 0)]
    reasons = {describe(values): reason for values, reason in grid.refused}
    assert set(reasons) == {
        "context=64 chunk_size=20 recall=2 recall_block=8",
        "context=64 chunk_size=64 recall=0 recall_block=8",
        "context=64 chunk_size=64 recall=2 recall_block=8",
    }
    assert "multiple of recall_block" in reasons["context=64 chunk_size=20 recall=2 recall_block=8"]
    assert (
        "at least two chunks of 64" in reasons["context=64 chunk_size=64 recall=0 recall_block=8"]
    )


def test_settings_without_effect_do_not_make_cells() -> None:
    grid = build_grid({"recall": [0, 2], "recall_span": [1, 2]}, [64], BASE)
    assert [(c.recall, c.recall_span) for _, c in grid.combinations] == [(0, 2), (2, 1), (2, 2)]
    grid = build_grid({"wide_layers": [(), (1,)], "wide_factor": [2, 3]}, [64], BASE)
    found = [(c.wide_layers, c.wide_factor) for _, c in grid.combinations]
    assert found == [((), PrefillConfig.wide_factor), ((1,), 2), ((1,), 3)]


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("chunk_size", "512, 1024", [512, 1024]),
        ("gqa_reduce", "sum,max", ["sum", "max"]),
        ("dense_layers", "none,0,0+1", [(), (0,), (0, 1)]),
        ("min_prefill", "none,64", [None, 64]),
        ("context", "4096", [4096]),
    ],
)
def test_values_are_read_from_text(name: str, text: str, values: list[Any]) -> None:
    assert parse_values(name, text) == values


@pytest.mark.parametrize(
    ("name", "text"),
    [("chunk_size", "512,"), ("recall", "many"), ("dense_layers", "0-3"), ("context", "")],
)
def test_values_that_cannot_be_read_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*got '{text}'"):
        parse_values(name, text)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PrefillConfig)])
def test_every_field_can_be_an_axis(name: str) -> None:
    default = getattr(PrefillConfig(), name)
    assert parse_values(name, format_value(default)) == [default]
    assert name in COLUMNS


def test_several_bases_are_combined_with_all_values() -> None:
    grid = build_grid({"heavy_budget": [64, 128]}, [4096], ["h2o", "recommended"])
    assert len(grid.combinations) == 4
    assert [config.recall > 0 for _, config in grid.combinations] == [False, False, True, True]
    assert grid.varied == ("heavy_budget", "preset")


def test_bases_that_are_no_presets_are_told_apart_by_what_differs() -> None:
    base = PrefillConfig(chunk_size=64, local_window=4, heavy_budget=4)
    grid = build_grid({}, [128], [base, base.replace(sink_tokens=4), base])
    assert [config.sink_tokens for _, config in grid.combinations] == [0, 4]
    assert grid.varied == ("sink_tokens",)
    with pytest.raises(ValueError, match=r"base must be settings or a sequence of them, got \[\]"):
        build_grid({}, [128], [])
