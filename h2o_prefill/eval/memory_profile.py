"""The memory of a model's prefill, dense and sparse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.guards import check_dense, check_length, eval_mode
from h2o_prefill.eval.peak_memory import peak_bytes
from h2o_prefill.eval.throughput import check_runs, random_ids
from h2o_prefill.presets import chosen_config

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int, str], None]


def profile_memory(
    model: Any,
    seq_lengths: Sequence[int],
    chunk_config: PrefillConfig | str | None = None,
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Count the bytes that the prefill of a model takes beside its weights.

    A run is one call over one prompt of random tokens that computes the logits of the last token
    only, and keeps its KV cache. Counted are tensors, on every device.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder with dense attention.
    seq_lengths : sequence of int
        Prompt lengths, tokens.
    chunk_config : PrefillConfig or str, optional
        Settings of the sparse runs. Default: that of `enable`.
    seed : int
        Of the random tokens.
    on_progress : callable, optional
        Called with (runs done, runs in all, what runs next).

    Returns
    -------
    pandas.DataFrame
        One row a length: `seq_length`; `dense_peak_bytes` and `sparse_peak_bytes`, the most that a
        run held at a time; of that, what is still there when it ends: `kv_cache_bytes`, the same
        for both, and `state_bytes`, the scores and memory sets of the sparse one.

    Raises
    ------
    ValueError
        If an argument is out of its range, or the model already runs sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    """
    config = chosen_config(chunk_config)
    lengths = check_runs(seq_lengths, 1)
    check_dense(model)
    check_length(model, max(lengths), "seq_lengths")
    import pandas as pd

    from h2o_prefill.hf import ChunkedPrefillCache, enable

    rows: list[dict[str, int]] = []
    generator = torch.Generator().manual_seed(seed)
    report = on_progress or (lambda done, total, what: None)
    with torch.no_grad(), eval_mode(model):
        for length in lengths:
            ids = random_ids(model, length, generator)
            dense, sparse = (ChunkedPrefillCache(config=model.config) for _ in range(2))
            report(2 * len(rows), 2 * len(lengths), f"{length} tokens dense, memory")
            dense_peak = _peak(model, ids, dense)
            report(2 * len(rows) + 1, 2 * len(lengths), f"{length} tokens sparse, memory")
            with enable(model, config, strict=True):
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
    report(2 * len(lengths), 2 * len(lengths), "done")
    return pd.DataFrame(rows)


def _peak(model: Any, ids: Tensor, cache: Any) -> int:
    options: dict[str, Any] = {"input_ids": ids, "past_key_values": cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    return peak_bytes(lambda: model(**options))


def _bytes(holders: Iterable[Any], *names: str) -> int:
    """Add up the tensors of those names; not every layer of every model has them."""
    tensors = [getattr(holder, name, None) for holder in holders for name in names]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))
