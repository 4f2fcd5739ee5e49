"""Throughput of dense and sparse prefill."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import benchmark_throughput, count_attention_flops
from h2o_prefill.eval.attention_flops import dense_dot_products, sparse_dot_products

pytest.importorskip("pandas")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tiny_model: Any) -> list[str]:
    """Replace the clock: dense calls take 6 s, sparse ones 2 s, 4 s, 2 s, ...; note what ran."""
    ran: list[str] = []
    sparse_times = itertools.cycle((2.0, 4.0))
    now = 0.0
    calls = 0

    def read() -> float:
        nonlocal now, calls
        calls += 1
        if calls % 2 == 0:
            sparse = tiny_model.config._attn_implementation == "h2o_prefill"
            ran.append("sparse" if sparse else "dense")
            now += next(sparse_times) if sparse else 6.0
        return now

    monkeypatch.setattr("h2o_prefill.eval.forward.time.perf_counter", read)
    return ran


def test_columns_and_figures(
    tiny_model: Any, small_config: PrefillConfig, clock: list[str]
) -> None:
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
    # They take turns; the first call is the probe of the output layer.
    assert "".join(name[0] for name in clock[1:]) == 2 * "dssddssd"


def test_recalled_keys_are_those_of_the_prompts(
    tiny_model: Any, small_config: PrefillConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = torch.arange(48).remainder(5).unsqueeze(0)
    monkeypatch.setattr("h2o_prefill.eval.timing.throughput.random_ids", lambda *_: prompt)
    config = small_config.replace(recall=2, recall_block=8)
    (row,) = benchmark_throughput(tiny_model, [48], 1, config).to_dict(orient="records")
    flops = count_attention_flops(prompt, config, 2)
    assert (row["attention_flops_ratio"], row["recalled_keys"]) == (
        flops.ratio,
        flops.recalled_keys,
    )
    assert row["recalled_keys"] > 1


def test_prompts_are_random_and_only_the_last_logits_are_made(
    tiny_model: Any, small_config: PrefillConfig
) -> None:
    prompts: list[torch.Tensor] = []
    kept: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["input_ids"].shape[1] in (32, 64):
            prompts.append(kwargs["input_ids"])
            kept.append(output.logits.shape[1])

    with_hook = tiny_model.register_forward_hook(note, with_kwargs=True)
    benchmark_throughput(tiny_model, [32, 64], 2, small_config, seed=1)
    with_hook.remove()
    assert len(kept) >= 12 and set(kept) == {1}
    short, long = ([ids for ids in prompts if ids.shape == (1, size)] for size in (32, 64))
    for same in (short, long):
        assert len(same) >= 6 and all(torch.equal(ids, same[0]) for ids in same)
    assert long[0].unique().numel() > 32
    assert int(long[0].max()) < 257
    assert not torch.equal(short[0][0], long[0][0, :32])
