"""The operators with a `PrefillConfig` and a `PrefillState` (`config` is that of the layer)."""

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
    """Prefill one layer sparsely, whatever the length of the call; return the state after it.

    Arguments are those of `ops.chunked_sparse_attention`. Without a state, all earlier tokens are
    candidates for the first memory set, with score 0.
    """
    out, scores, memory = ops.chunked_sparse_attention(
        q,
        k,
        v,
        None if state is None else state.scores.to(q.device),
        None if state is None else state.memory.to(q.device),
        *recall,
        0 if state is None else state.last_chunk_begin,
        config,
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
    """Return the set that the next chunk attends to, [B, Hkv, K + L + H]."""
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
    """Return `ops.lexical_recall` of a prompt, int64 [B, T_total], for the call from `begin` on."""
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
