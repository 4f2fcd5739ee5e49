"""Oracles of the operators, under their names and with their parameters: the steps put together.

float64 is computed in float64, everything else in float32. `out` has the dtype of q; lse, column
sums and scores have the dtype of the computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill.reference.attention import (
    OnlineSoftmaxState,
    causal_mask,
    finalize_online_softmax,
    fused_chunk_attention,
    masked_logits,
    merge_online_softmax,
    softmax_weights,
)
from h2o_prefill.reference.attention import intra_chunk_attention as attend_inside
from h2o_prefill.reference.budgets import HeadBudgets
from h2o_prefill.reference.linear_attention import (
    chunkwise_linear_attention as chunkwise_linear_attention,
)
from h2o_prefill.reference.linear_layers import linear as linear
from h2o_prefill.reference.linear_layers import pack_linear as pack_linear
from h2o_prefill.reference.linear_layers import packed_embedding as packed_embedding
from h2o_prefill.reference.memory import ScoreTracker, build_memory_set, gather_memory_kv
from h2o_prefill.reference.memory import gather_rows as gather_rows
from h2o_prefill.reference.recall import Settings, block_of, read_settings
from h2o_prefill.reference.recall import lexical_recall as lexical_recall

NO_RECALL = (None, None, None)


def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally inside chunks: query i sees keys j with chunk start <= j <= i."""
    queries, keys, values = _grouped(q, k, v)
    out = queries.new_empty(*queries.shape[:4], v.shape[3])
    lse, colsum = queries.new_empty(queries.shape[:4]), queries.new_empty(k.shape[:3])
    for begin in range(0, q.shape[2], chunk_size):
        rows = slice(begin, begin + chunk_size)
        chunk_q, chunk_k = queries[:, :, :, rows], keys[:, :, :, rows]
        logits = masked_logits(chunk_q, chunk_k, causal_mask(chunk_q.shape[3]), scale)
        weights, lse[..., rows] = softmax_weights(logits)
        out[:, :, :, rows] = weights @ values[:, :, :, rows]
        colsum[..., rows] = weights.sum(dim=(2, 3))
    return _ungrouped(out, q), lse.flatten(1, 2), colsum


def memory_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the keys of a memory set, all visible to every query."""
    queries, keys, values = _grouped(q, *gather_memory_kv((k, v), indices))
    mask = (indices >= 0)[:, :, None, None]
    weights, lse = softmax_weights(masked_logits(queries, keys, mask, scale))
    return _ungrouped(weights @ values, q), lse.flatten(1, 2), weights.sum(dim=(2, 3))


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend causally to the whole history: query i of Tq sees keys j <= T - Tq + i."""
    return sliding_window_attention(q, k, v, None, scale, sinks, softcap)[0]


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend causally in a window: query i of Tq sees T - Tq + i - window < j <= T - Tq + i.

    Without a window it sees all keys j <= T - Tq + i.
    """
    queries, keys, values = _grouped(q, k, v)
    mask = causal_mask(q.shape[2], k.shape[2], window)
    logits = masked_logits(queries, keys, mask, scale, softcap)
    weights, lse = softmax_weights(logits, _grouped_sinks(sinks, q, k))
    return _ungrouped(weights @ values, q), lse.flatten(1, 2)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets into attention over both."""

    def state(out: Tensor, lse: Tensor) -> OnlineSoftmaxState:
        empty = lse == -torch.inf  # a side without a key may hold anything in `out`
        values = out.to(_compute_dtype(out)).masked_fill(empty.unsqueeze(-1), 0)
        return OnlineSoftmaxState(lse.to(values.dtype), (~empty).to(values.dtype), values)

    merged = merge_online_softmax(state(out_a, lse_a), state(out_b, lse_b))
    lse = merged.m + merged.l.log()
    return finalize_online_softmax(merged).to(out_a.dtype), lse.to(lse_a.dtype)


def select_memory(
    scores: Tensor,
    memory: Tensor,
    chunk_begin: int,
    chunk_end: int,
    local_window: int,
    heavy_budget: int,
    sink_tokens: int,
) -> Tensor:
    """Select the memory set of the chunk that follows [chunk_begin, chunk_end)."""
    return build_memory_set(
        memory, chunk_begin, chunk_end, scores, local_window, heavy_budget, sink_tokens
    )


def chunked_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor | None,
    memory: Tensor | None,
    recall_offsets: Tensor | None,
    recall_positions: Tensor | None,
    recall_visible_from: Tensor | None,
    last_chunk_begin: int,
    settings: Settings,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    errors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one layer's sparse prefill of the Tq newest tokens.

    Positions [last_chunk_begin, T_total - Tq) are candidates of the call's first set. Sinks join
    the softmax of the output, and both softmaxes that scores come from.
    """
    config = read_settings(settings)
    (batch, heads, total), size = k.shape[:3], config.chunk_size
    past = total - q.shape[2]
    queries, keys, values = _grouped(q, k, v)
    grouped = _grouped_sinks(sinks, q, k)
    options: dict[str, Any] = {"scale": scale, "sinks": grouped, "softcap": softcap}
    out = queries.new_empty(*queries.shape[:4], v.shape[3])

    tracker = ScoreTracker(batch, heads, total, queries.dtype, q.device, config.gqa_reduce)
    if scores is not None:
        known = min(scores.shape[2], past)
        tracker.scores[:, :, :known] = scores[:, :, :known]
    budgets = HeadBudgets(config, batch, heads, errors)
    attended = torch.full((batch, heads, budgets.width), -1, dtype=torch.int32, device=q.device)
    if past and memory is not None:
        # A call without chunks passes the set on, in the width of these settings.
        width = min(attended.shape[2], memory.shape[2])
        attended[:, :, :width] = memory[:, :, :width]
    previous = attended if memory is None else memory
    recalled = None
    if recall_offsets is not None:
        lists = [recall_offsets, recall_positions, recall_visible_from]
        shape = (batch, q.shape[2], total)
        recalled = _recall_mask(lists, shape, size, block_of(size)).to(q.device)

    for begin in range(past, total, size):
        end = min(begin + size, total)
        rows = slice(begin - past, end - past)
        chunk = (queries[:, :, :, rows], keys[:, :, :, begin:end], values[:, :, :, begin:end])
        mask = causal_mask(end - begin)
        if begin == 0:
            out[:, :, :, rows], intra_weights = attend_inside(*chunk, mask, **options)
        else:
            attended = budgets.select(tracker.scores, previous, last_chunk_begin, begin)
            third = None
            if recalled is not None:  # a key in the memory set of a head does not count twice
                in_memory = (attended.unsqueeze(3) == torch.arange(total, device=q.device)).any(2)
                unseen = recalled[:, None, rows] & ~in_memory.unsqueeze(2)
                third = (keys, values, unseen.unsqueeze(2))
            out[:, :, :, rows], inter_weights, intra_weights = fused_chunk_attention(
                *chunk,
                *gather_memory_kv((keys, values), attended.unsqueeze(2)),
                mask,
                (attended >= 0).unsqueeze(2),
                recalled=third,
                **options,
            )
            for b in range(batch):
                tracker.accumulate_scores(b, attended[b], inter_weights[b])
            budgets.measure((queries, keys, values), out, begin, end, options)
        for b in range(batch):
            tracker.set_initial_scores(b, begin, end, intra_weights[b])
        previous, last_chunk_begin = attended, begin

    result = _ungrouped(out, q)
    if config.dense_tail > 0:
        tail = slice(max(q.shape[2] - config.dense_tail, 0), None)
        result[:, :, tail] = dense_attention(q[:, :, tail], k, v, scale, sinks, softcap)
    return result, tracker.scores, attended, budgets.errors.to(q.device)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as [B, Hkv, G, Tq, D], and k and v as [B, Hkv, 1, T, ...], which broadcast."""
    dtype = _compute_dtype(q)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1))
    return queries, k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)


def _grouped_sinks(sinks: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return sinks [Hq] as [Hkv, G, 1]."""
    if sinks is None:
        return None
    return sinks.to(_compute_dtype(q)).unflatten(0, (k.shape[1], -1)).unsqueeze(-1)


def _ungrouped(out: Tensor, q: Tensor) -> Tensor:
    return out.flatten(1, 2).to(q.dtype)


def _recall_mask(
    lists: list[Tensor | None], shape: tuple[int, int, int], chunk_size: int, block: int
) -> Tensor:
    """Return bool [B, Tq, T_total]: key j is recalled for row i."""
    offsets, positions, visible_from = ([] if x is None else x.tolist() for x in lists)
    batch, num_rows, total = shape
    past = total - num_rows
    num_blocks = -(-num_rows // block)
    mask = torch.zeros(shape, dtype=torch.bool)
    for b in range(batch):
        for row in range(num_rows):
            chunk_begin = past + row // chunk_size * chunk_size
            owner = b * num_blocks + row // block
            for entry in range(offsets[owner], offsets[owner + 1]):
                if visible_from[entry] <= past + row and 0 <= positions[entry] < chunk_begin:
                    mask[b, row, positions[entry]] = True
    return mask


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
