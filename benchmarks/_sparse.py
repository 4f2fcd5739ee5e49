"""The whole operator as the benchmarks call it."""

from __future__ import annotations

from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.visibility import RecalledKeys


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, config: PrefillConfig, recalled: RecalledKeys | None = None
) -> tuple[Tensor, ...]:
    """Prefill a prompt in one call, with or without recalled keys."""
    return ops.chunked_sparse_attention(
        q,
        k,
        v,
        None,
        None,
        None if recalled is None else recalled.offsets,
        None if recalled is None else recalled.positions,
        None if recalled is None else recalled.visible_from,
        last_chunk_begin=0,
        chunk_size=config.chunk_size,
        local_window=config.local_window,
        heavy_budget=config.heavy_budget,
        sink_tokens=config.sink_tokens,
        dense_tail=config.dense_tail,
        gqa_reduce=config.gqa_reduce,
        recall_block=config.recall_block,
    )
