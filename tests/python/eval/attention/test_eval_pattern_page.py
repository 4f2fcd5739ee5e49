"""Figures of errors, survival and recall, and the page that shows all figures."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import Corpus, measure_attention, run_ablation, visualize_attention_patterns
from h2o_prefill.eval.attention.html_page import Picture, write_page
from h2o_prefill.eval.attention.pattern_measures import heavy_positions, heavy_survival
from h2o_prefill.eval.attention.patterns import AttentionPatterns
from h2o_prefill.eval.recalled_keys import RecalledKeys, find_recalled

pytest.importorskip("matplotlib")

from h2o_prefill.eval.attention import error_plots, pattern_plots, recall_plots

LENGTH = 72  # four chunks of 16 tokens and one of 8
NAMES = ["memory", "scores", "sinks", "heavy", "survival", "errors", "chunks", "recalled"]


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    # Few words, so that there is something to recall.
    return torch.randint(1, 9, (1, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def config(small_config: PrefillConfig) -> PrefillConfig:
    return small_config.replace(recall=2, recall_block=8)


@pytest.fixture(scope="module")
def drawn(
    tiny: Any, prompt: Tensor, config: PrefillConfig, tmp_path_factory: pytest.TempPathFactory
) -> AttentionPatterns:
    folder = tmp_path_factory.mktemp("drawn")
    return visualize_attention_patterns(
        tiny.make_model(), prompt, config, folder, title="tiny & small"
    )


def _shown(axes: Any) -> Tensor:
    return torch.tensor(axes.images[0].get_array().tolist())


def test_the_maps_of_heads_show_the_measures_in_percent(drawn: AttentionPatterns) -> None:
    measures = drawn.measures
    assert measures is not None
    error, mass, *bars = error_plots.plot_errors(measures).axes
    torch.testing.assert_close(_shown(error), 100 * measures.l1_error)
    torch.testing.assert_close(_shown(mass), 100 * measures.mass_recall)
    assert error.images[0].get_clim()[0] == 0 and mass.images[0].get_clim()[1] == 100
    assert error.images[0].get_clim()[1] == pytest.approx(100 * measures.l1_error.amax().item())
    assert all("%" in bar.get_ylabel() for bar in bars) and len(bars) == 2
    texts = [text.get_text() for text in error.texts]
    assert texts == [f"{100 * value:.1f}" for value in measures.l1_error.flatten().tolist()]
    # Both maps are dark where it is bad, and numbers there are white.
    for axes, worst in ((error, measures.l1_error.argmax()), (mass, measures.mass_recall.argmin())):
        image = axes.images[0]
        brightness = image.to_rgba(image.get_array())[..., :3].sum(-1).flatten()
        assert brightness.argmin() == worst
        assert axes.texts[int(worst)].get_color() == "white"


def test_heads_that_a_layer_lacks_stay_empty(
    tiny: Any, prompt: Tensor, config: PrefillConfig, tmp_path: Path
) -> None:
    patterns = visualize_attention_patterns(tiny.make_uneven_model(), prompt, config, tmp_path)
    assert patterns.measures is not None and all(p.is_file() for p in patterns.paths.values())
    error = error_plots.plot_errors(patterns.measures).axes[0]
    assert error.images[0].get_array().mask.tolist() == [[False] * 4, [False, False, True, True]]
    assert len(error.texts) == 6
    scores = pattern_plots.plot_scores(patterns).axes[0]
    torch.testing.assert_close(_shown(scores)[1], patterns.scores[1, 0])


def test_lines_by_chunk(drawn: AttentionPatterns) -> None:
    measures = drawn.measures
    assert measures is not None
    error, mass, stable = error_plots.plot_chunks(measures).axes
    for axes, values in (
        (error, measures.l1_error_by_chunk),
        (mass, measures.mass_recall_by_chunk),
    ):
        (line,) = (line for line in axes.lines if line.get_label() == "mean")
        assert list(line.get_xdata()) == [0, 1, 2, 3, 4]
        expected = (100 * values.flatten(1).mean(1)).tolist()
        assert list(line.get_ydata()) == pytest.approx(expected)
        assert axes.get_ylabel() == "%" and axes.get_xlabel() == "chunk"
    (line,) = (line for line in stable.lines if line.get_label() == "mean")
    # Chunk 2 is the first that can be compared with the chunk before.
    assert list(line.get_xdata()) == [2, 3, 4]
    assert list(line.get_ydata()) == pytest.approx(measures.jaccard[:3].mean((1, 2)).tolist())


def test_with_two_chunks_there_is_no_stability(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    measures = measure_attention(tiny_model, prompt[:, :32], small_config)
    stable = error_plots.plot_chunks(measures).axes[2]
    assert not stable.lines and stable.texts[0].get_text() == "needs three chunks"


def test_survival_has_a_line_a_layer(drawn: AttentionPatterns) -> None:
    survival = heavy_survival(heavy_positions(drawn.memory, drawn.chunk_ends, drawn.config))
    axes = pattern_plots.plot_survival(drawn).axes[0]
    assert len(axes.lines) == 3
    for line, values in zip(axes.lines, [*survival.T, survival.mean(1)], strict=True):
        assert list(line.get_ydata()) == pytest.approx(values.tolist())
    assert survival[0].tolist() == [1, 1] and survival[1].amax() < 1


def test_recalled_positions_are_counted(drawn: AttentionPatterns, prompt: Tensor) -> None:
    recalled = drawn.recalled
    assert recalled is not None
    counts = recall_plots.recalled_counts(recalled, LENGTH, 5)
    assert counts.shape == (9, 15)
    for block in range(9):
        first, last = recalled.offsets[block : block + 2].tolist()
        positions = recalled.positions[first:last].tolist()
        for column in range(15):
            inside = [p for p in positions if 5 * column <= p < 5 * column + 5]
            assert counts[block, column] == len(inside)
    left, right = recall_plots.plot_recalled(recalled, drawn.chunk_ends).axes[:2]
    shown = left.images[0].get_array()
    # One column a token here. A block of the second chunk can recall the first chunk alone.
    assert shown.shape == (9, LENGTH)
    assert shown.mask[:2].all() and shown.mask[2, 16:].all() and not shown.mask[2, :16].any()
    assert shown.sum() == recalled.positions.numel() > 0
    values, edges, _ = right.patches[0].get_data()
    assert values.tolist() == recalled.offsets.diff().tolist()
    assert edges.tolist() == list(range(0, LENGTH + 1, 8))


def test_rows_of_the_lists_are_those_of_a_call(prompt: Tensor, config: PrefillConfig) -> None:
    recalled = find_recalled(prompt, config)
    assert recalled is not None
    for begin, end in ((0, 16), (32, 48), (64, 72)):
        call = ops.lexical_recall(prompt[:, :end], begin, 16, 8, 2)
        for ours, theirs in zip(recalled.of_rows(begin, end), call, strict=True):
            assert torch.equal(ours, theirs)


def test_a_mask_shows_a_row_what_came_before_it() -> None:
    offsets, positions, visible_from = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 2, 3], [1, 0, 2], [2, 3, 4])
    )
    recalled = RecalledKeys(offsets, positions, visible_from, block=2)
    assert recalled.mask(1, 6).int().tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
    ]


def test_the_page_holds_every_figure(drawn: AttentionPatterns) -> None:
    assert list(drawn.paths) == NAMES
    assert drawn.page is not None
    text = drawn.page.read_text(encoding="utf-8")
    held = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", text)]
    assert held == [path.read_bytes() for path in drawn.paths.values()]
    assert text.count("<figcaption>") == len(NAMES)
    assert "tiny &amp; small" in text and "72 tokens in 5 chunks" in text
    measures = drawn.measures
    assert measures is not None
    assert f"{100 * measures.l1_error.mean().item():.2f} % (mean of all heads)" in text
    # It needs no other file.
    assert not re.search(r"(src|href)=\"(?!data:)", text)


def test_without_errors_and_recall_the_page_is_shorter(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig, tmp_path: Path
) -> None:
    patterns = visualize_attention_patterns(
        tiny_model, prompt, small_config, tmp_path, errors=False
    )
    assert list(patterns.paths) == NAMES[:5]
    assert patterns.measures is None and patterns.recalled is None
    assert patterns.page is not None
    text = patterns.page.read_text(encoding="utf-8")
    assert text.count("<img") == 5 and "relative L1" not in text


def test_the_rows_of_an_ablation_are_drawn_too(
    tiny_model: Any,
    tiny_tokenizer: Any,
    tiny: Any,
    prompt: Tensor,
    small_config: PrefillConfig,
    tmp_path: Path,
) -> None:
    pytest.importorskip("pandas")
    frame = run_ablation(
        tiny_model,
        {"heavy_budget": [0, 4]},
        tmp_path,
        base=small_config,
        datasets=[Corpus("tale", tiny.SENTENCE * 6, "tale.txt")],
        contexts=[64],
        windows="0:2",
        tokenizer=tiny_tokenizer,
    )
    patterns = visualize_attention_patterns(
        tiny_model, prompt, small_config, tmp_path / "out", errors=False, ablation=frame
    )
    assert list(patterns.paths) == [*NAMES[:5], "perplexity"]
    assert patterns.page is not None
    text = patterns.page.read_text(encoding="utf-8")
    picture = base64.b64encode(patterns.paths["perplexity"].read_bytes()).decode()
    assert picture in text and "Perplexity against attention flops" in text


def test_what_a_page_is_given_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    picture = Picture(tmp_path / "a.png", 'one "two"', "a < b")
    path = write_page(tmp_path / "page.html", "<title>", {"x & y": "1 > 0"}, [picture])
    text = path.read_text(encoding="utf-8")
    assert "<h1>&lt;title&gt;</h1>" in text
    assert "<th>x &amp; y</th><td>1 &gt; 0</td>" in text
    assert 'alt="one &quot;two&quot;"' in text and "<figcaption>a &lt; b</figcaption>" in text
