"""Seconds and memory of dense and sparse prefill, and their figures."""

import itertools
import math
from collections import Counter

import pytest
import torch

from h2o_prefill.eval import benchmark_throughput, count_attention_flops, profile_memory
from h2o_prefill.eval.attention_flops import dense_dot_products, sparse_dot_products
from h2o_prefill.eval.plots import plot_memory_profile, plot_throughput
from h2o_prefill.eval.timing import peak_bytes

pytest.importorskip("pandas")


@pytest.fixture
def clock(monkeypatch, tiny_model):
    """Replace the time of a call: dense ones take 6 s, sparse ones 2 s, 4 s, ...; note what ran."""
    ran = []
    sparse_times = itertools.cycle((2.0, 4.0))

    def run(self, input_ids):
        ran.append(tiny_model.config._attn_implementation)
        return None, next(sparse_times) if ran[-1] == "h2o_prefill" else 6.0

    monkeypatch.setattr("h2o_prefill.eval.forward.PromptForward.__call__", run)
    return ran


def test_columns_and_figures(tiny_model, small_config, clock):
    frame = benchmark_throughput(tiny_model, [16, 48], 3, small_config)
    ratio = dense_dot_products(48) / sparse_dot_products(48, small_config)
    expected = {
        "seq_length": [16, 48],
        "dense_seconds": [6, 6],
        # The first of four sparse runs, 2 s, is not counted: 4, 2, 4 remain.
        "sparse_seconds": [4, 4],
        "dense_tokens_per_second": [16 / 6, 48 / 6],
        "sparse_tokens_per_second": [4, 12],
        "speedup": [1.5, 1.5],
        "speedup_min": [1.5, 1.5],
        "speedup_max": [3, 3],
        "attention_flops_ratio": [1, ratio],
        "recalled_keys": [math.nan, math.nan],
        "num_runs": [3, 3],
    }
    assert ratio > 1 and list(frame.columns) == list(expected)
    for name, values in expected.items():
        assert frame[name].tolist() == pytest.approx(values, nan_ok=True)
    # They take turns.
    assert "".join(name[0] for name in clock) == 2 * "shhsshhs"


def test_recalled_keys_are_those_of_the_prompts(tiny_model, small_config, monkeypatch):
    prompt = torch.arange(48).remainder(5).unsqueeze(0)
    monkeypatch.setattr("h2o_prefill.eval.timing.random_ids", lambda *_: prompt)
    config = small_config.replace(recall=2)
    (row,) = benchmark_throughput(tiny_model, [48], 1, config).to_dict(orient="records")
    flops = count_attention_flops(prompt, config, 2)
    assert row["attention_flops_ratio"] == flops.ratio
    assert row["recalled_keys"] == flops.recalled_keys > 1


@pytest.fixture
def frame(tiny_model, small_config):
    return profile_memory(tiny_model, [15, 16, 48, 96], small_config)


def test_what_is_kept_is_counted_to_the_byte(frame, small_config):
    # A prompt shorter than a chunk is dense.
    assert frame.seq_length.tolist() == [15, 16, 48, 96] and frame.state_bytes[0] == 0
    frame = frame[1:]
    for row in frame.to_dict(orient="records"):
        # Two layers of two KV heads of 16 dims in fp32; scores fp32, memory sets int32.
        assert row["kv_cache_bytes"] == 2 * 2 * 2 * row["seq_length"] * 16 * 4
        assert row["state_bytes"] == 2 * 2 * 4 * (row["seq_length"] + small_config.memory_size)
        for name in ("dense", "sparse"):
            kept = row["kv_cache_bytes"] + (row["state_bytes"] if name == "sparse" else 0)
            assert kept < row[f"{name}_peak_bytes"] < 40 * kept
    assert frame.dense_peak_bytes.is_monotonic_increasing


def test_peak_bytes_counts_what_is_held_at_a_time():
    def call():
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(500, dtype=torch.float32)
        del first
        return second + 1

    assert peak_bytes(call) == pytest.approx(6000, abs=200)


def test_figures_show_the_tables(frame, tiny_model, small_config, tmp_path):
    (whole,) = plot_memory_profile(frame, tmp_path / "m.png", "a title").axes
    tops = Counter()
    for bar in whole.patches:
        tops[round(bar.get_x() + bar.get_width() / 2, 2)] += bar.get_height()
    peaks = frame[["dense_peak_bytes", "sparse_peak_bytes"]].to_numpy().flatten() / 1e6
    assert [tops[middle] for middle in sorted(tops)] == pytest.approx(peaks.tolist())

    frame = benchmark_throughput(tiny_model, [32, 48], 2, small_config)
    rate, ratio = plot_throughput(frame, tmp_path / "t.png", "a title").axes
    assert list(rate.lines[1].get_ydata()) == frame.sparse_tokens_per_second.tolist()
    (errors,) = ratio.containers
    assert list(errors.lines[0].get_ydata()) == frame.speedup.tolist()
