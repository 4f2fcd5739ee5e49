"""Oracles of the operators, under their names: written to be read, not to be fast.

Each builds the mask of what a query may see over *all* keys and takes one softmax. Nothing is
gathered, blocked or merged, so a mistake in gathering, blocking or merging cannot be in both.
Selection is that of `memory_selection`, and linear attention goes token by token.

Shapes: q [B, Hq, Tq, D]; k [B, Hkv, T, D]; v [B, Hkv, T, Dv]; Hq is a multiple of Hkv, and query
head h belongs to KV head h // (Hq / Hkv). fp64 computes in fp64, everything else in fp32. `out` has
the dtype of q; lse (natural log), column sums and scores have the dtype computed in. `scale`
defaults to D^-0.5. `sinks` [Hq] join every softmax as one more logit without a value; `softcap` > 0
bounds logits, the sinks excepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill.reference.gather import gather_rows
from h2o_prefill.reference.linear_attention import (
    bidirectional_linear_attention,
    recurrent_linear_attention,
)
from h2o_prefill.reference.memory_selection import build_memory_set
from h2o_prefill.reference.recall import lexical_recall

__all__ = [
    "chunked_sparse_attention",
    "chunkwise_linear_attention",
    "chunkwise_linear_attention_backward",
    "dense_attention",
    "gather_rows",
    "intra_chunk_attention",
    "lexical_recall",
    "memory_attention",
    "merge_states",
    "select_memory",
]


def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally inside chunks: query i sees keys j with chunk start <= j <= i.

    Parameters and results are those of `h2o_prefill.ops.intra_chunk_attention`.
    """
    mask = _chunk_mask(0, q.shape[2], chunk_size, q.device).expand(*k.shape[:2], -1, -1)
    weights, lse = _softmax_over(q, k, mask, scale)
    return _mix(weights, v, q.dtype), lse, _column_sums(weights, k.shape[1], "sum")


def memory_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the keys of a memory set, all visible to every query.

    Parameters and results are those of `h2o_prefill.ops.memory_attention`.
    """
    mask = _membership(indices, k.shape[2]).unsqueeze(2).expand(-1, -1, q.shape[2], -1)
    weights, lse = _softmax_over(q, k, mask, scale)
    sums = _column_sums(weights, k.shape[1], "sum")
    return _mix(weights, v, q.dtype), lse, gather_rows(sums.unsqueeze(-1), indices).squeeze(-1)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend causally to the whole history: query i of Tq sees keys j <= T - Tq + i.

    Parameters and results are those of `h2o_prefill.ops.dense_attention`.
    """
    mask = _causal_mask(k.shape[2] - q.shape[2], k.shape[2], q.device).expand(*k.shape[:2], -1, -1)
    weights, _ = _softmax_over(q, k, mask, scale, sinks, softcap)
    return _mix(weights, v, q.dtype)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets into attention over both.

    Parameters and results are those of `h2o_prefill.ops.merge_states`.
    """
    dtype = _compute_dtype(out_a)
    lse = torch.logaddexp(lse_a.to(dtype), lse_b.to(dtype))
    finite = lse.masked_fill(lse == -torch.inf, 0)
    share_a = (lse_a.to(dtype) - finite).exp().unsqueeze(-1)
    share_b = (lse_b.to(dtype) - finite).exp().unsqueeze(-1)
    # A side without a key has the share 0 and may hold anything, so it must not be multiplied.
    part_a = torch.where(share_a > 0, share_a * out_a.to(dtype), 0)
    part_b = torch.where(share_b > 0, share_b * out_b.to(dtype), 0)
    return (part_a + part_b).to(out_a.dtype), lse.to(lse_a.dtype)


def select_memory(
    scores: Tensor,
    memory: Tensor,
    chunk_begin: int,
    chunk_end: int,
    local_window: int,
    heavy_budget: int,
    sink_tokens: int,
) -> Tensor:
    """Select the memory set of the chunk that follows [chunk_begin, chunk_end).

    Parameters and results are those of `h2o_prefill.ops.select_memory`.
    """
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
    chunk_size: int,
    local_window: int,
    heavy_budget: int,
    sink_tokens: int = 0,
    dense_tail: int = 0,
    gqa_reduce: str = "sum",
    recall_block: int = 128,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer's sparse prefill of the Tq newest tokens.

    Positions [last_chunk_begin, T_total - Tq) are candidates of the call's first set. Sinks join
    the softmax of the output, and that of either phase that scores come from.

    Parameters and results are those of `h2o_prefill.ops.chunked_sparse_attention`.
    """
    batch, heads, total = k.shape[:3]
    past = total - q.shape[2]
    visible = _chunk_mask(past, total, chunk_size, q.device).repeat(batch, heads, 1, 1)

    # Phase 1: every chunk looks at itself, and that gives its tokens their first score.
    weights, _ = _softmax_over(q, k, visible, scale, sinks, softcap)
    new_scores = torch.zeros(batch, heads, total, dtype=weights.dtype, device=q.device)
    if scores is not None:
        new_scores[:, :, : scores.shape[2]] = scores
    new_scores[:, :, past:] = _column_sums(weights, heads, gqa_reduce)[:, :, past:]

    # Phase 2: chunk after chunk looks back at its memory set and votes for what it finds there.
    width = sink_tokens + local_window + heavy_budget
    attended = torch.full((batch, heads, width), -1, dtype=torch.int32, device=q.device)
    if q.shape[2] == 0 and past and memory is not None:
        # A call without tokens hands the set on, in the width of these settings.
        kept = min(width, memory.shape[2])
        attended[:, :, :kept] = memory[:, :, :kept]
    previous = attended if memory is None else memory
    for begin in range(past, total, chunk_size):
        rows = slice(begin - past, begin - past + chunk_size)
        if begin > 0:
            attended = select_memory(
                new_scores,
                previous,
                last_chunk_begin,
                begin,
                local_window,
                heavy_budget,
                sink_tokens,
            )
            in_memory = _membership(attended, total).unsqueeze(2)
            chunk_q = q[:, :, rows]
            in_memory_of_rows = in_memory.expand(-1, -1, chunk_q.shape[2], -1)
            weights, _ = _softmax_over(chunk_q, k, in_memory_of_rows, scale, sinks, softcap)
            new_scores += _column_sums(weights, heads, gqa_reduce)
            visible[:, :, rows] |= in_memory
        previous, last_chunk_begin = attended, begin

    if recall_offsets is not None:
        recalled = _recall_mask(
            [recall_offsets, recall_positions, recall_visible_from],
            (batch, q.shape[2], total),
            chunk_size,
            recall_block,
        )
        visible |= recalled.to(q.device).unsqueeze(1)
    if dense_tail > 0:
        visible[:, :, -dense_tail:] = _causal_mask(past, total, q.device)[-dense_tail:]

    # The output: one softmax over whatever a row sees, however it came to see it.
    weights, _ = _softmax_over(q, k, visible, scale, sinks, softcap)
    return _mix(weights, v, q.dtype), new_scores, attended


def chunkwise_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_normalizer: Tensor | None = None,
    feature_map: str = "elu+1",
    chunk_size: int = 64,
    causal: bool = True,
    diagonal_once: bool = False,
    normalize: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend linearly, as `linear_attention` says; `chunk_size` changes nothing.

    Parameters and results are those of `h2o_prefill.ops.chunkwise_linear_attention`.
    """
    out, state, normalizer = recurrent_linear_attention(
        q, k, v, log_decay, initial_state, initial_normalizer, feature_map, normalize, scale
    )
    if not causal:
        out = bidirectional_linear_attention(
            q, k, v, log_decay, feature_map, diagonal_once, normalize, scale
        )
    return out, state, normalizer if normalize else normalizer[..., :0]


def chunkwise_linear_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    initial_normalizer: Tensor | None,
    grad_out: Tensor,
    grad_state: Tensor | None,
    grad_normalizer: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, ...]:
    """Differentiate the oracle above by PyTorch.

    Parameters and results are those of `h2o_prefill.ops.chunkwise_linear_attention_backward`.
    """
    given = [
        None if x is None else x.detach().requires_grad_()
        for x in (q, k, v, log_decay, initial_state, initial_normalizer)
    ]
    inputs = [x for x in given if x is not None]
    with torch.enable_grad():
        results = chunkwise_linear_attention(*given, *settings)  # type: ignore[arg-type]
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, (grad_out, grad_state, grad_normalizer), strict=True)
        if gradient is not None and result.requires_grad
    ]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in pairs],
            inputs,
            [gradient.to(result.dtype) for result, gradient in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return tuple(
        q.new_empty(0, dtype=_compute_dtype(q)) if x is None else next(found) for x in given
    )


def _causal_mask(past: int, total: int, device: torch.device) -> Tensor:
    """Return bool [total - past, total]: key j is not after row i."""
    row = torch.arange(past, total, device=device).unsqueeze(1)
    return torch.arange(total, device=device) <= row


def _chunk_mask(past: int, total: int, chunk_size: int, device: torch.device) -> Tensor:
    """Return bool [total - past, total]: key j is in the chunk of row i and not after it."""
    row = torch.arange(past, total, device=device).unsqueeze(1)
    key = torch.arange(total, device=device)
    chunk_begin = past + (row - past) // chunk_size * chunk_size
    return (chunk_begin <= key) & (key <= row)


def _membership(indices: Tensor, length: int) -> Tensor:
    """Return bool [..., length]: whether a position is among the indices."""
    mask = torch.zeros(*indices.shape[:-1], length + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(-1, indices.long().masked_fill(indices < 0, length), True)
    return mask[..., :length]


def _recall_mask(
    lists: list[Tensor | None],
    shape: tuple[int, int, int],
    chunk_size: int,
    block: int,
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


def _softmax_over(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    scale: float | None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return weights [B, Hq, Tq, T] and lse [B, Hq, Tq] where mask [B, Hkv, Tq, T] is True."""
    dtype = _compute_dtype(q)
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    logits = factor * (q.to(dtype) @ keys.transpose(-1, -2))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask.repeat_interleave(group, dim=1), -torch.inf)
    lse = logits.logsumexp(dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype).unsqueeze(-1))
    finite = lse.masked_fill(lse == -torch.inf, 0)  # a row that sees nothing has weights 0, not nan
    return (logits - finite.unsqueeze(-1)).exp(), lse


def _mix(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    group = weights.shape[1] // v.shape[1]
    return (weights @ v.to(weights.dtype).repeat_interleave(group, dim=1)).to(dtype)


def _column_sums(weights: Tensor, heads: int, reduce: str) -> Tensor:
    """Return [B, Hkv, T]: what each key got from all queries, reduced over the group's heads."""
    per_head = weights.sum(dim=2).unflatten(1, (heads, -1))
    if reduce == "sum":
        return per_head.sum(dim=2)
    if reduce == "max":
        return per_head.amax(dim=2)
    raise ValueError(f"gqa_reduce must be 'sum' or 'max', got {reduce!r}")


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
