"""Seconds and memory of a prefill, dense and sparse."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import count_attention_flops
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.generation.prompts import random_ids
from h2o_prefill.generation.runs import (
    Progress,
    check_counts,
    check_model,
    count_steps,
    eval_mode,
    prefill_mode,
    sparse_at_any_length,
)
from h2o_prefill.hf.kinds import count_heads

if TYPE_CHECKING:
    import pandas as pd


def benchmark_throughput(
    model: Any,
    seq_lengths: Sequence[int],
    num_runs: int = 10,
    chunk_config: PrefillConfig | str | None = None,
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure time and memory of the prefill of a model, dense and sparse, at several lengths.

    A run is one call over one prompt of random tokens, see `random_ids`, that computes the logits
    of the last token only. Dense and sparse runs take turns, each first in every other round, so
    that a machine that drifts slows both alike; one run of each before that is not timed, and
    counts memory.

    Parameters
    ----------
    seq_lengths : sequence of int
        Prompt lengths, tokens. Up to one chunk sparse attention is dense, and the ratio about 1.
    num_runs : int
        Timed runs of each mode at each length.
    seed : int
        Seed of the random tokens.
    model, chunk_config, on_progress
        As in `h2o_prefill.eval`.

    Returns
    -------
    pandas.DataFrame
        One row per length: `seq_length`; medians `dense_seconds`, `sparse_seconds`,
        `dense_tokens_per_second`, `sparse_tokens_per_second`; `speedup`, the ratio of the medians,
        dense over sparse; `speedup_min` and `speedup_max`, the same ratio within single rounds;
        `attention_flops_ratio` and `recalled_keys` as in `AttentionFlops` (NaN where recall is
        off); `dense_peak_bytes` and `sparse_peak_bytes`, the most bytes of tensors beside the
        weights, on all devices; `num_runs`.
    """
    config = sparse_at_any_length(chunk_config)
    check_counts("num_runs", num_runs)
    lengths = list(seq_lengths)
    if not lengths:
        raise ValueError("seq_lengths must hold at least one length, got none")
    check_counts("seq_lengths", *lengths)
    check_model(model, max(lengths), "seq_lengths")
    import pandas as pd

    rows: list[dict[str, float]] = []
    step = count_steps(on_progress, len(lengths) * 2 * (num_runs + 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), eval_mode(model):
        forward = PromptForward(model)
        modes = [("dense", None), ("sparse", config)]
        for length in lengths:
            ids = random_ids(model, length, generator)
            seconds: dict[str, list[float]] = {"dense": [], "sparse": []}
            peaks: dict[str, int] = {}
            for run in range(num_runs + 1):
                for name, mode in modes[:: -1 if run % 2 else 1]:
                    step(f"{length} tokens {name}")
                    with prefill_mode(model, mode, strict=True):
                        if run:
                            seconds[name].append(forward.prefill(ids))
                        else:  # this one also warms up
                            peaks[f"{name}_peak_bytes"] = peak_bytes(partial(forward.prefill, ids))
            flops = count_attention_flops(ids, config, *count_heads(model))
            rounds = pd.DataFrame(seconds)
            dense, sparse = rounds.median()
            by_round = rounds["dense"] / rounds["sparse"]
            rows.append(
                {
                    "seq_length": length,
                    "dense_seconds": dense,
                    "sparse_seconds": sparse,
                    "dense_tokens_per_second": length / dense,
                    "sparse_tokens_per_second": length / sparse,
                    "speedup": dense / sparse,
                    "speedup_min": by_round.min(),
                    "speedup_max": by_round.max(),
                    "attention_flops_ratio": flops.ratio,
                    "recalled_keys": math.nan
                    if flops.recalled_keys is None
                    else flops.recalled_keys,
                    **peaks,
                    "num_runs": num_runs,
                }
            )
    step("done")
    return pd.DataFrame(rows)


# The profiler looks for a GPU when it starts, and says so where there is none.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that a call held at a time, its results included.

    Counted by PyTorch's allocator, so it is exact and repeatable. What is not a tensor is missing.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        call()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    size = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        size += event.nbytes()
        peak = max(peak, size)
    return peak
