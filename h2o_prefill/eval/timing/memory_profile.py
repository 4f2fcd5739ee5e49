"""The memory that a call takes, and that of a model's prefill, dense and sparse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.runs import last_logits_only
from h2o_prefill.eval.timing.throughput import check_runs
from h2o_prefill.generation.prompts import random_ids
from h2o_prefill.generation.runs import Progress, count_steps, eval_mode, prefill_mode, settings_for

if TYPE_CHECKING:
    import pandas as pd


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
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def profile_memory(
    model: Any,
    seq_lengths: Sequence[int],
    chunk_config: PrefillConfig | str | None = None,
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Count the bytes that the prefill of a model takes in addition to its weights.

    A run is one call over one prompt of random tokens that computes the logits of the last token
    only, and keeps its KV cache. Counted are tensors, on every device.
    """
    config = settings_for(model, chunk_config)
    lengths = check_runs(model, seq_lengths, 1)
    import pandas as pd

    from h2o_prefill.hf import ChunkedPrefillCache

    rows: list[dict[str, int]] = []
    step = count_steps(on_progress, 2 * len(lengths))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), eval_mode(model):
        for length in lengths:
            ids = random_ids(model, length, generator)
            dense, sparse = (ChunkedPrefillCache(config=model.config) for _ in range(2))
            step(f"{length} tokens dense, memory")
            dense_peak = _peak(model, ids, dense)
            step(f"{length} tokens sparse, memory")
            with prefill_mode(model, config, strict=True):
                sparse_peak = _peak(model, ids, sparse)
            states = [getattr(layer, "state", None) for layer in sparse.layers]
            rows.append(
                {
                    "seq_length": length,
                    "dense_peak_bytes": dense_peak,
                    "sparse_peak_bytes": sparse_peak,
                    "kv_cache_bytes": _bytes(sparse.layers, "keys", "values"),
                    "state_bytes": _bytes(states, "scores", "memory"),
                }
            )
    step("done")
    return pd.DataFrame(rows)


def _peak(model: Any, ids: Tensor, cache: Any) -> int:
    from h2o_prefill.hf.cache import cache_argument

    arguments = {**cache_argument(model, cache), **last_logits_only(model)}
    return peak_bytes(lambda: model(input_ids=ids, **arguments))


def _bytes(holders: Iterable[Any], *names: str) -> int:
    """Add up the tensors of those names; not every layer of every model has them."""
    tensors = [getattr(holder, name, None) for holder in holders for name in names]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))
