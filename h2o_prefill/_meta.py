"""What every operator returns, by shape and dtype alone: for torch.compile and torch.export."""

from __future__ import annotations

import torch
from torch import Tensor


def _accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty_heads(q: Tensor, value_dim: int) -> Tensor:
    """[B, Hq, T, Dv] whose transpose(1, 2) is contiguous."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], value_dim).transpose(1, 2)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], dtype=_accumulate_dtype(q))


@torch.library.register_fake("h2o_prefill::intra_chunk_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    colsum = k.new_empty(k.shape[0], k.shape[1], k.shape[2], dtype=_accumulate_dtype(q))
    return _empty_heads(q, v.shape[3]), _empty_lse(q), colsum


@torch.library.register_fake("h2o_prefill::memory_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    colsum = q.new_empty(indices.shape, dtype=_accumulate_dtype(q))
    return _empty_heads(q, v.shape[3]), _empty_lse(q), colsum


@torch.library.register_fake("h2o_prefill::dense_attention")
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return _empty_heads(q, v.shape[3])


@torch.library.register_fake("h2o_prefill::merge_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_heads(out_a, out_a.shape[3]), lse_a.new_empty(lse_a.shape)


@torch.library.register_fake("h2o_prefill::select_memory")
def _(
    scores: Tensor,
    memory: Tensor,
    chunk_begin: int,
    chunk_end: int,
    local_window: int,
    heavy_budget: int,
    sink_tokens: int,
) -> Tensor:
    return memory.new_empty(
        memory.shape[0], memory.shape[1], sink_tokens + local_window + heavy_budget
    )


@torch.library.register_fake("h2o_prefill::gather_rows")
def _(x: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], indices.shape[2], x.shape[3])


@torch.library.register_fake("h2o_prefill::chunked_sparse_attention")
def _(
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
) -> tuple[Tensor, Tensor, Tensor]:
    new_scores = k.new_empty(k.shape[0], k.shape[1], k.shape[2], dtype=_accumulate_dtype(q))
    new_memory = k.new_empty(
        k.shape[0], k.shape[1], sink_tokens + local_window + heavy_budget, dtype=torch.int32
    )
    return _empty_heads(q, v.shape[3]), new_scores, new_memory


@torch.library.register_fake("h2o_prefill::lexical_recall")
def _(
    token_ids: Tensor,
    begin: int,
    chunk_size: int,
    block: int,
    k: int,
    max_suffix: int = 3,
    span: int = 2,
    max_count: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = (token_ids.shape[1] - begin + block - 1) // block
    found = torch.library.get_ctx().new_dynamic_size()
    offsets = token_ids.new_empty(token_ids.shape[0] * blocks + 1, dtype=torch.int32)
    return (
        offsets,
        token_ids.new_empty(found, dtype=torch.int32),
        token_ids.new_empty(found, dtype=torch.int32),
    )
