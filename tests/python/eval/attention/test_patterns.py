"""Memory sets and scores of a prompt, what is measured on them, and the figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import AttentionPatterns, visualize_attention_patterns
from h2o_prefill.eval.attention.patterns import collect_patterns

LENGTH = 72  # four chunks of 16 tokens and one of 8


CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
PROMPT = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _one_call(model: Any, prompt: Tensor, config: PrefillConfig) -> list[Any]:
    cache = h2o_prefill.ChunkedPrefillCache(config=model.config)
    with h2o_prefill.enable(model, config):
        model(prompt, past_key_values=cache)
    return [layer.state for layer in cache.layers]


@pytest.mark.parametrize(
    "options", [{}, {"sink_tokens": 2, "dense_tail": 12}, {"recall": 1, "recall_block": 8}]
)
def test_scores_and_sets_are_those_of_one_call(tiny_model: Any, options: dict[str, int]) -> None:
    config = CONFIG.replace(**options)
    patterns = collect_patterns(tiny_model, PROMPT, config)
    assert patterns.chunk_ends == (16, 32, 48, 64, 72)
    assert patterns.layers == (0, 1) and patterns.kv_heads == (2, 2)
    assert patterns.memory.shape == (5, 2, 2, config.memory_size)
    assert patterns.scores.shape == (2, 2, LENGTH)
    # The set after a chunk is what the next chunk of one call attends to.
    for chunk, end in enumerate(patterns.chunk_ends[1:]):
        states = _one_call(tiny_model, PROMPT[:, :end], config.replace(dense_tail=0))
        # A dense tail changes what later layers see, and so does where the call ends.
        layers = slice(None) if config.dense_tail == 0 else slice(1)
        expected = torch.stack([state.memory[0] for state in states])
        assert torch.equal(patterns.memory[chunk, layers], expected[layers])
    # The last one is what a next call would attend to.
    assert (patterns.memory[-1, :, :, -4:] == torch.arange(LENGTH - 4, LENGTH)).all()
    states = _one_call(tiny_model, PROMPT, config)
    torch.testing.assert_close(
        patterns.scores, torch.stack([state.scores[0] for state in states]), rtol=1e-4, atol=1e-4
    )


def test_dense_wide_and_uneven_layers(tiny: Any, tiny_model: Any) -> None:
    patterns = collect_patterns(tiny_model, PROMPT, CONFIG.replace(dense_layers=(0,)))
    assert patterns.layers == (1,)
    assert patterns.memory.shape[1] == patterns.scores.shape[0] == 1

    config = CONFIG.replace(wide_layers=(1,), wide_factor=2)
    wide = collect_patterns(tiny_model, PROMPT, config).memory
    narrow = collect_patterns(tiny_model, PROMPT, CONFIG).memory
    size = CONFIG.memory_size
    assert wide.shape[-1] == 2 * size and (wide[:, 0, :, size:] == -1).all()
    assert torch.equal(wide[:, 0, :, :size], narrow[:, 0])
    # The local window is twice as long there too.
    assert (wide[-1, 1, :, -8:] == torch.arange(LENGTH - 8, LENGTH)).all()

    uneven = collect_patterns(tiny.make_uneven_model(), PROMPT, CONFIG)
    assert uneven.kv_heads == (2, 1)
    assert (uneven.memory[:, 1, 1] == -1).all() and uneven.scores[1, 1].isnan().all()
    # The local window is held by all the heads of a layer.
    assert (uneven.head_share(4)[:, -4:] == 1).all()


def _patterns(sets: list[list[list[int]]], config: PrefillConfig, layer: int = 0) -> Any:
    """Return patterns of one layer whose heads hold `sets`, [chunks][heads], after each chunk."""
    memory = torch.tensor(sets, dtype=torch.int32).unsqueeze(1)
    ends = tuple(config.chunk_size * (chunk + 1) for chunk in range(len(sets)))
    heads = memory.shape[2]
    return AttentionPatterns(
        memory, torch.ones(1, heads, ends[-1]), (layer,), (heads,), ends, config
    )


def test_measures_of_memory_sets() -> None:
    config = PrefillConfig(chunk_size=8, local_window=2, heavy_budget=3, sink_tokens=1)
    patterns = _patterns([[[0, 3, -1], [3, 4, 5]]], config)
    assert patterns.head_share(0).tolist() == [[0.5, 0, 0, 1, 0.5, 0.5, 0, 0]]
    # Heavy {1, 2}, {1, 6}, {1, 14}: of 1, 2 and 6, which entered before the last set, 1 alone
    # is there one set later; of 1 and 2 it is two sets later.
    sets = [[[0, 1, 2, 6, 7]], [[0, 1, 6, 14, 15]], [[0, 1, 14, 22, 23]]]
    survival = _patterns(sets, config.replace(heavy_budget=2)).heavy_survival()
    assert survival[:, 0].tolist() == pytest.approx([1, 1 / 3, 1 / 2])
    # Heavy {2, 3, 5}, then {3, 5, 9}; a window of four leaves {2, 3} and {3, 5, 9}.
    sets = [[[0, 2, 3, 5, 6, 7]], [[0, 3, 5, 9, 14, 15]]]
    wide = config.replace(wide_layers=(7,), wide_factor=2)
    for found, share in ((_patterns(sets, config), 2 / 3), (_patterns(sets, wide, layer=7), 1 / 2)):
        assert found.heavy_survival()[:, 0].tolist() == pytest.approx([1, share])
    nothing = _patterns([[[-1, -1]]] * 2, config)
    assert nothing.heavy_survival().isnan().all()


def _shown(axes: Any) -> Tensor:
    return torch.from_numpy(axes.images[0].get_array().filled(math.nan))


def test_the_figures_show_the_arrays(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from h2o_prefill.eval.attention import plots

    folder = tmp_path / "new" / "folder"
    config = CONFIG.replace(recall=2, recall_block=8)
    patterns = visualize_attention_patterns(tiny.make_uneven_model(), PROMPT[0], config, folder)
    assert patterns.paths == {"memory": folder / "memory.png", "errors": folder / "errors.png"}
    for path in patterns.paths.values():
        assert path.read_bytes().startswith(b"\x89PNG")
    measures = patterns.measures
    assert patterns.recalled is not None and measures is not None

    panels = plots.plot_memory(patterns, tmp_path / "memory.png", "tiny").axes[:5]
    for chunk, (panel, end) in enumerate(zip(panels, patterns.chunk_ends, strict=True)):
        torch.testing.assert_close(_shown(panel), patterns.head_share(chunk)[:, :end])
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


def test_long_prompts_are_averaged_and_many_chunks_are_sampled(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from h2o_prefill.eval.attention import plots

    config = PrefillConfig(chunk_size=128, local_window=0, heavy_budget=4)
    ends = tuple(128 * (chunk + 1) for chunk in range(16))
    memory = torch.arange(4, dtype=torch.int32).expand(16, 40, 2, 4)
    scores = torch.ones(40, 2, ends[-1])
    patterns = AttentionPatterns(memory, scores, tuple(range(40)), (2,) * 40, ends, config)
    panels = plots.plot_memory(patterns, tmp_path / "memory.png", "").axes[:8]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert [int(title.split()[4]) for title in titles] == [0, 2, 4, 6, 9, 11, 13, 15]
    # 2048 positions in 1024 columns: the four that are held fill two of them.
    last = _shown(panels[-1])
    assert last.shape == (40, 1024) and last[0, :4].tolist() == [1, 1, 0, 0]
    labels = [tick.get_text() for tick in panels[0].get_yticklabels()]
    assert labels == ["0", "5", "10", "15", "20", "25", "30", "35"]
    assert "local window" not in panels[-1].get_xlabel()


def test_without_errors_there_is_one_figure_and_no_dense_run(
    tiny_model: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    steps: list[tuple[int, int, str]] = []
    tiny_model.train()
    options: dict[str, Any] = {"errors": False, "on_progress": lambda *step: steps.append(step)}
    patterns = visualize_attention_patterns(tiny_model, PROMPT, CONFIG, tmp_path, **options)
    assert steps == [(i, 5, f"chunk {i}") for i in range(5)] + [(5, 5, "done")]
    assert patterns.measures is None and patterns.recalled is None
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]
    assert tiny_model.training and tiny_model.config._attn_implementation == "sdpa"
