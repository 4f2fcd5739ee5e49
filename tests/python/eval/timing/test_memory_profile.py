"""Memory of dense and sparse prefill, and the figures of throughput and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import benchmark_throughput, profile_memory
from h2o_prefill.eval.plots import plot_memory_profile, plot_throughput
from h2o_prefill.eval.timing.memory_profile import peak_bytes

pd = pytest.importorskip("pandas")

LENGTHS = [16, 48, 96]


@pytest.fixture
def frame(tiny_model: Any, small_config: PrefillConfig) -> Any:
    return profile_memory(tiny_model, LENGTHS, small_config)


def test_what_is_kept_is_counted_to_the_byte(frame: Any, small_config: PrefillConfig) -> None:
    assert frame.seq_length.tolist() == LENGTHS
    for row in frame.to_dict(orient="records"):
        # Two layers of two KV heads of 16 dims in fp32; scores fp32, memory sets int32.
        assert row["kv_cache_bytes"] == 2 * 2 * 2 * row["seq_length"] * 16 * 4
        assert row["state_bytes"] == 2 * 2 * 4 * (row["seq_length"] + small_config.memory_size)
        for name in ("dense", "sparse"):
            kept = row["kv_cache_bytes"] + (row["state_bytes"] if name == "sparse" else 0)
            assert kept < row[f"{name}_peak_bytes"] < 40 * kept
    assert frame.dense_peak_bytes.is_monotonic_increasing


def test_peak_bytes_counts_what_is_held_at_a_time() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(500, dtype=torch.float32)
        del first
        return second + 1

    assert peak_bytes(call) == pytest.approx(6000, abs=200)


def test_short_prompts_have_no_state(tiny_model: Any, small_config: PrefillConfig) -> None:
    assert profile_memory(tiny_model, [15], small_config).state_bytes.tolist() == [0]


def test_progress_and_the_model_as_it_was(tiny_model: Any, small_config: PrefillConfig) -> None:
    steps: list[tuple[int, int, str]] = []
    tiny_model.train()
    profile_memory(tiny_model, [16, 32], small_config, on_progress=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(done, 4) for done in range(5)]
    assert steps[1][2] == "16 tokens sparse, memory"
    assert tiny_model.training and tiny_model.config._attn_implementation == "sdpa"


def test_the_figure_of_memory_stacks_its_parts_to_the_peak(frame: Any, tmp_path: Path) -> None:
    figure = plot_memory_profile(frame, tmp_path / "m.png", "a title")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    (whole,) = figure.axes
    tops: dict[float, float] = {}
    for bar in whole.patches:
        middle = round(bar.get_x() + bar.get_width() / 2, 2)
        # Each part begins where the one below it ends.
        assert bar.get_y() == pytest.approx(tops.get(middle, 0))
        tops[middle] = bar.get_y() + bar.get_height()
    heights = [tops[middle] for middle in sorted(tops)]
    peaks = frame[["dense_peak_bytes", "sparse_peak_bytes"]].to_numpy().flatten() / 1e6
    assert heights == pytest.approx(peaks.tolist())
    share = 100 * frame.state_bytes.iloc[-1] / frame.kv_cache_bytes.iloc[-1]
    assert f"add {share:.1f} % to the KV cache" in figure.get_suptitle()
    assert [tick.get_text() for tick in whole.get_xticklabels()] == ["16", "48", "96"]


def test_the_figure_of_throughput(
    tiny_model: Any, small_config: PrefillConfig, tmp_path: Path
) -> None:
    frame = benchmark_throughput(tiny_model, [32, 48], 2, small_config)
    figure = plot_throughput(frame, tmp_path / "t.png", "a title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    rate, ratio = figure.axes
    for line, name in zip(rate.lines, ("dense", "sparse"), strict=True):
        assert line.get_label() == name
        assert list(line.get_ydata()) == frame[f"{name}_tokens_per_second"].tolist()
    (errors,) = ratio.containers
    assert list(errors.lines[0].get_ydata()) == frame.speedup.tolist()
    (bars,) = errors.lines[2]
    ends = [[end[1] for end in segment] for segment in bars.get_segments()]
    expected = frame[["speedup_min", "speedup_max"]].to_numpy().flatten().tolist()
    assert [y for pair in ends for y in pair] == pytest.approx(expected)
    (flops,) = (line for line in ratio.lines if "flops" in str(line.get_label()))
    assert list(flops.get_ydata()) == frame.attention_flops_ratio.tolist()
