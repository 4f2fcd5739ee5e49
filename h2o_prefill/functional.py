"""The operators with a `PrefillConfig` and a `PrefillState` (`config` is that of the layer)."""

from __future__ import annotations

from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import DOUBLINGS, PrefillState

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
    out, scores, memory, errors = ops.chunked_sparse_attention(
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
        None if state is None else state.errors.to(q.device),
    )
    past = k.shape[2] - q.shape[2]
    return out, PrefillState(
        scores=scores,
        memory=memory,
        length=k.shape[2],
        last_chunk_begin=config.last_chunk_begin(past, q.shape[2]),
        errors=errors,
    )


def next_memory(state: PrefillState, config: PrefillConfig) -> Tensor:
    """Return the set that the next chunk attends to, as a state has the last one."""
    batch, heads = state.memory.shape[:2]
    sets = state.memory.new_full((batch, heads, config.memory_size), -1)
    by_head = {head: factor for _, head, factor in config.wide_heads}
    most = config.max_widen.bit_length() - 1 if config.error_rows else 0
    for b in range(batch):
        for h in range(heads):
            doublings = min(max(int(state.errors[b, h, DOUBLINGS]), 0), most)
            factor = by_head.get(h, 1) << doublings
            one = slice(b, b + 1), slice(h, h + 1)
            selected = ops.select_memory(
                state.scores[one],
                state.memory[one],
                state.last_chunk_begin,
                state.length,
                config.local_window * factor,
                config.heavy_budget * factor,
                config.sink_tokens,
            )
            sets[b, h, : selected.shape[2]] = selected[0, 0]
    return sets


def recall_lists(
    token_ids: Tensor, begin: int, config: PrefillConfig, token_text: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `ops.lexical_recall` of a prompt, int64 [B, T_total], for the call from `begin` on."""
    return ops.lexical_recall(token_ids, begin, config, token_text)
