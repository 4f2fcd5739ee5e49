"""The operators with the settings of a config: the only place that takes a config apart."""

from __future__ import annotations

from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import PrefillState

RecallLists = tuple[Tensor | None, Tensor | None, Tensor | None]

# Softmax scale, sinks and softcap, as the operators take them.
LogitOptions = tuple[float | None, Tensor | None, float]

PLAIN_LOGITS: LogitOptions = (None, None, 0.0)

NO_RECALL: RecallLists = (None, None, None)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PrefillState | None,
    config: PrefillConfig,
    recall: RecallLists = NO_RECALL,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, PrefillState]:
    """Prefill one layer sparsely, whatever the length of the call.

    Parameters
    ----------
    q, k, v, scale, sinks, softcap
        As `ops.chunked_sparse_attention` takes them.
    state : PrefillState, optional
        What the previous call of the prompt returned. Without it, all that came before is candidate
        for the first memory set, with score 0.
    config : PrefillConfig
        Of the layer (`PrefillConfig.of_layer`).
    recall : tuple of Tensor
        What `recall_lists` returned for the call.

    Returns
    -------
    out : Tensor
        [B, Hq, Tq, Dv].
    state : PrefillState
        For the next call.
    """
    out, scores, memory = ops.chunked_sparse_attention(
        q,
        k,
        v,
        None if state is None else state.scores.to(q.device),
        None if state is None else state.memory.to(q.device),
        *recall,
        0 if state is None else state.last_chunk_begin,
        config.chunk_size,
        config.local_window,
        config.heavy_budget,
        config.sink_tokens,
        config.dense_tail,
        config.gqa_reduce,
        config.recall_block,
        scale,
        sinks,
        softcap,
    )
    past = k.shape[2] - q.shape[2]
    return out, PrefillState(
        scores=scores,
        memory=memory,
        length=k.shape[2],
        last_chunk_begin=config.last_chunk_begin(past, q.shape[2]),
    )


def next_memory(state: PrefillState, config: PrefillConfig) -> Tensor:
    """Return the set that the next chunk attends to: a state holds the last one.

    Parameters
    ----------
    state : PrefillState
    config : PrefillConfig
        Of the layer.

    Returns
    -------
    Tensor
        int32 [B, Hkv, K + L + H].
    """
    return ops.select_memory(
        state.scores,
        state.memory,
        state.last_chunk_begin,
        state.length,
        config.local_window,
        config.heavy_budget,
        config.sink_tokens,
    )


def recall_lists(
    token_ids: Tensor, begin: int, config: PrefillConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Search a prompt as `config` says, for the calls of the operators.

    Parameters
    ----------
    token_ids : Tensor
        int64 [B, T_total], the prompt up to the end of the call.
    begin : int
        Where the call begins.
    config : PrefillConfig
        With `recall` > 0.

    Returns
    -------
    offsets, positions, visible_from : Tensor
        As `ops.lexical_recall` returns them.
    """
    return ops.lexical_recall(token_ids, begin, *recall_settings(config))


def recall_settings(config: PrefillConfig) -> tuple[int, int, int, int, int, int]:
    """Return the settings of `ops.lexical_recall`, in its order."""
    return (
        config.chunk_size,
        config.recall_block,
        config.recall,
        config.recall_suffix,
        config.recall_span,
        config.recall_max_count,
    )
