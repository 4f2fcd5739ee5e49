"""Seconds and memory of dense and sparse prefill."""

import itertools
import math

import pytest
import torch

from h2o_prefill.eval import benchmark_throughput, count_attention_flops
from h2o_prefill.eval.attention_flops import dense_dot_products, sparse_dot_products
from h2o_prefill.eval.timing import peak_bytes

pytest.importorskip("pandas")


@pytest.fixture
def clock(monkeypatch, tiny_model):
    """Replace the time of a call: dense ones take 6 s, sparse ones 2 s, 4 s, ...; note what ran."""
    ran = []
    sparse_times = itertools.cycle((2.0, 4.0))

    def run(self, input_ids):
        ran.append(tiny_model.config._attn_implementation)
        return next(sparse_times) if ran[-1] == "h2o_prefill" else 6.0

    def peak_bytes(call):
        call()
        return 100 * len(ran)

    monkeypatch.setattr("h2o_prefill.eval.forward.PromptForward.prefill", run)
    monkeypatch.setattr("h2o_prefill.eval.timing.peak_bytes", peak_bytes)
    return ran


def test_columns(tiny_model, small_config, clock):
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
        # Of the first run of each; a round has two runs.
        "dense_peak_bytes": [100, 900],
        "sparse_peak_bytes": [200, 1000],
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


def test_peak_bytes_counts_what_is_held_at_a_time():
    def call():
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(500, dtype=torch.float32)
        del first
        return second + 1

    assert peak_bytes(call) == pytest.approx(6000, abs=200)
