"""The figures of memory sets and of errors by layer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import measure_attention, visualize_attention_patterns
from h2o_prefill.eval.attention import plots

pytest.importorskip("matplotlib")

LENGTH = 72  # four chunks of 16 tokens and one of 8
CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
PROMPT = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(5))


def _shown(axes: Any) -> Tensor:
    return torch.from_numpy(axes.images[0].get_array().filled(math.nan))


def test_the_figures_show_the_arrays(tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    model = tiny.make_uneven_model()
    for figure_format, magic in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        measures = visualize_attention_patterns(model, PROMPT[0], CONFIG, folder, figure_format)
        for name in ("memory", "errors", "stability", "attention"):
            assert (folder / f"{name}.{figure_format}").read_bytes().startswith(magic)
    torch.testing.assert_close(
        measures.l1_error, measure_attention(model, PROMPT, CONFIG).l1_error, equal_nan=True
    )

    panels = plots.plot_memory(measures, tmp_path / "memory.png", "tiny").axes[:5]
    for chunk, (panel, end) in enumerate(zip(panels, measures.chunk_ends, strict=True)):
        torch.testing.assert_close(_shown(panel), measures.head_share(chunk)[:, :end])
        assert panel.images[0].get_extent()[:2] == [0, end] and panel.get_xlim() == (0, LENGTH)
        assert f"after chunk {chunk} ({end} tokens)" in panel.get_title(loc="left")

    error, mass, *_ = plots.plot_errors(measures, tmp_path / "errors.png", "tiny").axes
    # The second layer has half the heads.
    absent = [[False] * 4, [False, False, True, True]]
    assert error.images[0].get_array().mask.tolist() == absent
    for axes, values, worst in (
        (error, 100 * measures.l1_error, measures.l1_error.nan_to_num(0).argmax()),
        (mass, 100 * measures.mass_recall, measures.mass_recall.nan_to_num(1).argmin()),
    ):
        torch.testing.assert_close(_shown(axes), values, equal_nan=True)
        assert [text.get_text() for text in axes.texts] == [
            f"{value:.1f}" for value in values[~values.isnan()].tolist()
        ]
        # Both maps are darkest at the worst head, whose number is white.
        cells = axes.images[0].get_array()
        brightness = axes.images[0].to_rgba(cells)[..., :3].sum(-1)
        brightness[cells.mask] = 3
        assert brightness.argmin() == worst and axes.texts[int(worst)].get_color() == "white"


def test_the_figures_of_stability_and_attention(tiny: Any, tmp_path: Path) -> None:
    measures = measure_attention(tiny.make_uneven_model(), PROMPT, CONFIG)
    chunks, pairs, _ = plots.plot_stability(measures, tmp_path / "s.png", "tiny").axes
    torch.testing.assert_close(_shown(chunks), measures.heavy_jaccard.nanmean(-1).T)
    torch.testing.assert_close(_shown(pairs), measures.heavy_jaccard_of_layers)
    assert [tick.get_text() for tick in chunks.get_xticklabels()] == ["1", "2", "3", "4"]
    first, second, _ = plots.plot_attention(measures, tmp_path / "a.png", "tiny").axes
    for layer, axes in enumerate((first, second)):
        torch.testing.assert_close(_shown(axes).nan_to_num(), measures.pattern[:, layer].nanmean(1))
        assert axes.get_title(loc="left") == f"layer {layer}"
        assert axes.images[0].get_extent() == [0, LENGTH, LENGTH, 0]


def test_long_prompts_are_averaged_and_many_chunks_are_sampled(
    tiny_model: Any, tmp_path: Path
) -> None:
    measures = dataclasses.replace(
        measure_attention(tiny_model, PROMPT, CONFIG),
        config=PrefillConfig(chunk_size=128, local_window=0, heavy_budget=4),
        memory=torch.arange(4, dtype=torch.int32).expand(16, 40, 2, 4),
        layers=tuple(range(40)),
        kv_heads=(2,) * 40,
        chunk_ends=tuple(128 * (chunk + 1) for chunk in range(16)),
    )
    panels = plots.plot_memory(measures, tmp_path / "memory.png", "").axes[:8]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert [int(title.split()[4]) for title in titles] == [0, 2, 4, 6, 9, 11, 13, 15]
    # 2048 positions in 1024 columns: the four that are held fill two of them.
    last = _shown(panels[-1])
    assert last.shape == (40, 1024) and last[0, :4].tolist() == [1, 1, 0, 0]
    labels = [tick.get_text() for tick in panels[0].get_yticklabels()]
    assert labels == ["0", "5", "10", "15", "20", "25", "30", "35"]
    assert "local window" not in panels[-1].get_xlabel()
