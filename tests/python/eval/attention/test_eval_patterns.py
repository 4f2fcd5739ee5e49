"""Memory sets and scores of a prompt, what is measured on them, and their figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import visualize_attention_patterns
from h2o_prefill.eval.attention.pattern_measures import (
    head_share,
    heavy_overlap,
    heavy_positions,
    heavy_survival,
    held_positions,
    memory_jaccard,
)
from h2o_prefill.eval.attention.patterns import AttentionPatterns, collect_patterns

LENGTH = 72  # four chunks of 16 tokens and one of 8


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _one_call(model: Any, prompt: Tensor, config: PrefillConfig) -> list[Any]:
    cache = h2o_prefill.ChunkedPrefillCache(config=model.config)
    with h2o_prefill.enable(model, config):
        model(prompt, past_key_values=cache)
    return [layer.state for layer in cache.layers]


@pytest.mark.parametrize(
    "options", [{}, {"sink_tokens": 2, "dense_tail": 12}, {"recall": 1, "recall_block": 8}]
)
def test_scores_and_sets_are_those_of_one_call(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig, options: dict[str, int]
) -> None:
    config = small_config.replace(**options)
    patterns = collect_patterns(tiny_model, prompt, config)
    assert patterns.chunk_ends == (16, 32, 48, 64, 72)
    assert patterns.layers == (0, 1)
    assert patterns.memory.shape == (5, 2, 2, config.memory_size)
    assert patterns.scores.shape == (2, 2, LENGTH)
    # The set after a chunk is what the next chunk of one call attends to.
    for chunk, end in enumerate(patterns.chunk_ends[1:]):
        states = _one_call(tiny_model, prompt[:, :end], config.replace(dense_tail=0))
        # A dense tail changes what later layers see, and so does where the call ends.
        layers = slice(None) if config.dense_tail == 0 else slice(1)
        expected = torch.stack([state.memory[0] for state in states])
        assert torch.equal(patterns.memory[chunk, layers], expected[layers])
    states = _one_call(tiny_model, prompt, config)
    torch.testing.assert_close(
        patterns.scores, torch.stack([state.scores[0] for state in states]), rtol=1e-4, atol=1e-4
    )


def test_the_last_set_is_what_a_next_call_attends_to(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    patterns = collect_patterns(tiny_model, prompt[:, :48], small_config)
    longer = collect_patterns(tiny_model, prompt[:, :64], small_config)
    assert torch.equal(patterns.memory, longer.memory[:3])
    assert (patterns.memory[2, :, :, -4:] == torch.arange(44, 48)).all()


def test_dense_layers_are_left_out(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    patterns = collect_patterns(tiny_model, prompt, small_config.replace(dense_layers=(0,)))
    assert patterns.layers == (1,)
    assert patterns.memory.shape[1] == patterns.scores.shape[0] == 1
    with pytest.raises(ValueError, match=r"dense_layers must leave a layer sparse, got \(0, 1\)"):
        collect_patterns(tiny_model, prompt, small_config.replace(dense_layers=(0, 1)))


def test_wide_layers_hold_more(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    config = small_config.replace(wide_layers=(1,), wide_factor=2)
    wide = collect_patterns(tiny_model, prompt, config).memory
    narrow = collect_patterns(tiny_model, prompt, small_config).memory
    size = small_config.memory_size
    assert wide.shape[-1] == 2 * size and (wide[:, 0, :, size:] == -1).all()
    assert torch.equal(wide[:, 0, :, :size], narrow[:, 0])
    assert (wide[1:, 1] >= 0).all()
    # The local window is twice as long there too.
    assert (wide[-1, 1, :, -8:] == torch.arange(LENGTH - 8, LENGTH)).all()


def test_held_positions_and_shares() -> None:
    memory = torch.tensor([[[[0, 3, -1], [3, 4, 5]]]], dtype=torch.int32)
    held = held_positions(memory, 6)
    assert held[0, 0].int().tolist() == [[1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1]]
    assert head_share(memory, 6)[0, 0].tolist() == [0.5, 0, 0, 1, 0.5, 0.5]


def test_heavy_overlap_leaves_out_sinks_and_the_local_window() -> None:
    config = PrefillConfig(chunk_size=8, local_window=2, heavy_budget=3, sink_tokens=1)
    first = [0, 2, 3, 5, 6, 7]
    second = [0, 3, 5, 9, 14, 15]
    memory = torch.tensor([[[first]], [[second]]], dtype=torch.int32)
    # Heavy {2, 3, 5}, then {3, 5, 9}: two of four.
    heavy = heavy_positions(memory, (8, 16), config)
    assert heavy_overlap(heavy).tolist() == [[[0.5]]]
    # A window of four leaves {2, 3} and {3, 5, 9}.
    wide = config.replace(wide_layers=(7,), wide_factor=2)
    heavy = heavy_positions(memory, (8, 16), wide, layers=(7,))
    assert heavy_overlap(heavy).tolist() == [[[0.25]]]
    nothing = heavy_positions(torch.full_like(memory, -1), (8, 16), config)
    assert math.isnan(heavy_overlap(nothing).item())


def test_memory_jaccard_counts_whole_sets() -> None:
    memory = torch.tensor([[[[0, 1, 2]]], [[[1, 2, 5]]], [[[6, 7, -1]]]], dtype=torch.int32)
    assert memory_jaccard(memory, 8)[:, 0, 0].tolist() == [0.5, 0]
    assert memory_jaccard(torch.full_like(memory, -1), 8).isnan().all()


def test_heavy_survival_counts_from_the_first_heavy_set() -> None:
    config = PrefillConfig(chunk_size=8, local_window=2, heavy_budget=2, sink_tokens=1)
    sets = [[0, 1, 2, 6, 7], [0, 1, 6, 14, 15], [0, 1, 14, 22, 23]]
    memory = torch.tensor(sets, dtype=torch.int32).view(3, 1, 1, 5)
    # Heavy {1, 2}, {1, 6}, {1, 14}: of 1, 2 and 6, which entered before the last set, 1 alone
    # is there one set later; of 1 and 2 it is two sets later.
    survival = heavy_survival(heavy_positions(memory, (8, 16, 24), config))
    assert survival[:, 0].tolist() == pytest.approx([1, 1 / 3, 1 / 2])
    nothing = heavy_positions(torch.full_like(memory, -1), (8, 16, 24), config)
    assert heavy_survival(nothing).isnan().all()


def test_layers_with_fewer_kv_heads(tiny: Any, prompt: Tensor, small_config: PrefillConfig) -> None:
    patterns = collect_patterns(tiny.make_uneven_model(), prompt, small_config)
    assert patterns.kv_heads == (2, 1)
    assert patterns.memory.shape == (5, 2, 2, 8) and patterns.scores.shape == (2, 2, LENGTH)
    assert (patterns.memory[:, 1, 1] == -1).all() and patterns.scores[1, 1].isnan().all()
    share = head_share(patterns.memory, LENGTH, patterns.kv_heads)
    # The local window is held by all the heads that there are.
    assert (share[-1, :, -4:] == 1).all()


@pytest.fixture(scope="module")
def drawn(
    tiny: Any, prompt: Tensor, small_config: PrefillConfig, tmp_path_factory: pytest.TempPathFactory
) -> AttentionPatterns:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("drawn") / "new" / "folder"
    return visualize_attention_patterns(
        tiny.make_model(), prompt[0], small_config, folder, title="tiny"
    )


def test_every_figure_is_written(drawn: AttentionPatterns) -> None:
    folder = drawn.paths["memory"].parent
    assert folder.name == "folder"
    names = ("memory", "scores", "sinks", "heavy", "survival", "errors", "chunks")
    assert drawn.paths == {name: folder / f"{name}.png" for name in names}
    for path in drawn.paths.values():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn.page == folder / "index.html"


def _assert_shown(shown: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(shown.tolist()), expected)


def test_the_figures_show_the_arrays(drawn: AttentionPatterns) -> None:
    import numpy as np

    from h2o_prefill.eval.attention import pattern_plots

    share = head_share(drawn.memory, LENGTH)
    panels = pattern_plots.plot_memory(drawn).axes[:5]
    for chunk, panel in enumerate(panels):
        shown = panel.images[0].get_array()
        end = drawn.chunk_ends[chunk]
        _assert_shown(shown[:, :end], share[chunk, :, :end])
        hidden = np.ma.getmaskarray(shown)
        assert hidden[:, end:].all() and not hidden[:, :end].any()
        assert f"after chunk {chunk} ({end} tokens)" in panel.get_title(loc="left")
        assert panel.get_ylabel() == "layer"
    assert "position" in panels[-1].get_xlabel()

    scores = pattern_plots.plot_scores(drawn).axes[0].images[0]
    _assert_shown(scores.get_array(), drawn.scores.mean(1))
    assert type(scores.norm).__name__ == "LogNorm"

    sinks = pattern_plots.plot_sinks(drawn).axes[0]
    heights = [bar.get_height() for bar in sinks.patches]
    assert heights == pytest.approx(share[-1, :, :4].mean(-1).tolist())
    assert list(sinks.lines[0].get_ydata()) == pytest.approx(share[-1, :, 0].tolist())

    heavy = pattern_plots.plot_heavy(drawn).axes[0]
    positions = heavy_positions(drawn.memory, drawn.chunk_ends, drawn.config)
    _assert_shown(heavy.images[0].get_array(), heavy_overlap(positions).mean(-1))
    assert heavy.get_yticklabels()[0].get_text() == "0 to 1"


def test_long_prompts_are_binned_and_many_chunks_are_sampled() -> None:
    pytest.importorskip("matplotlib")
    from h2o_prefill.eval.attention import pattern_plots

    chunks, size = 20, 64
    config = PrefillConfig(chunk_size=size, local_window=0, heavy_budget=4)
    ends = tuple(size * (chunk + 1) for chunk in range(chunks))
    memory = torch.arange(4, dtype=torch.int32).expand(chunks, 40, 2, 4)
    scores = torch.ones(40, 2, ends[-1])
    scores[3, :, 700] = 50.0
    patterns = AttentionPatterns(memory, scores, tuple(range(40)), ends, config)
    memory_axes = pattern_plots.plot_memory(patterns).axes
    titles = [axes.get_title(loc="left") for axes in memory_axes[:8]]
    assert [int(title.split()[4]) for title in titles] == [0, 3, 5, 8, 11, 14, 16, 19]
    # 1280 positions in columns of 3: the four that are held fill one column and a third.
    first = memory_axes[0].images[0].get_array()
    assert first.shape == (40, 427)
    assert first[0, :3].tolist() == pytest.approx([1, 1 / 3, 0])
    assert "mean of 3 positions" in memory_axes[7].get_xlabel()
    assert "local window" not in titles[0]
    shown = pattern_plots.plot_scores(patterns).axes[0].images[0].get_array()
    assert shown[3, 700 // 3] == 50 and shown.max() == 50 and shown.min() == 1
    labels = [tick.get_text() for tick in memory_axes[0].get_yticklabels()]
    assert labels == ["0", "5", "10", "15", "20", "25", "30", "35"]


def test_without_a_heavy_budget_there_is_no_overlap(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    config = small_config.replace(heavy_budget=0)
    patterns = visualize_attention_patterns(tiny_model, prompt, config, tmp_path, errors=False)
    heavy = heavy_positions(patterns.memory, patterns.chunk_ends, config)
    assert heavy_overlap(heavy).isnan().all()
    assert patterns.paths["heavy"].is_file()


def test_progress_and_the_models_mode(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    steps: list[tuple[int, int, str]] = []
    tiny_model.train()
    collect_patterns(tiny_model, prompt, small_config, on_progress=lambda *step: steps.append(step))
    assert steps == [(i, 5, f"chunk {i}") for i in range(5)] + [(5, 5, "done")]
    assert tiny_model.training
    assert tiny_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        (torch.ones(2, 64, dtype=torch.int64), r"input_ids must be .*got torch.int64 \[2, 64\]"),
        (torch.ones(64), r"input_ids must be .*got torch.float32 \[64\]"),
        (torch.ones(1, 1, 64, dtype=torch.int64), r"input_ids must be .*\[1, 1, 64\]"),
        (torch.ones(31, dtype=torch.int64), "at least two chunks of 16 tokens, got 31 tokens"),
        (torch.ones(33, dtype=torch.int64), "cut it to 32 tokens, got 33"),
        (torch.ones(528, dtype=torch.int64), "input_ids must be <= 512, .* got 528"),
    ],
)
def test_wrong_prompts(
    tiny_model: Any, small_config: PrefillConfig, tmp_path: Path, input_ids: Tensor, message: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        visualize_attention_patterns(tiny_model, input_ids, small_config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_folder_and_model(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output_dir must be a folder, got the file '.*file'"):
        visualize_attention_patterns(tiny_model, prompt, small_config, tmp_path / "file")
    with (
        h2o_prefill.enable(tiny_model, small_config),
        pytest.raises(ValueError, match="model must have dense attention"),
    ):
        visualize_attention_patterns(tiny_model, prompt, small_config, tmp_path)
