"""Sparse prefill attention as a module: settings inside, state handed in and out."""

from typing import Optional

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig


class ChunkedSparseAttention(nn.Module):
    """Attend under chunked sparse prefill, one layer and one call at a time.

    The module holds settings and no state: what a prompt leaves behind goes in and out as tensors,
    so that it can be scripted, copied, and shared by prompts.

    Parameters
    ----------
    config : PrefillConfig, optional
        Default: the algorithm as specified.

    Example
    -------
    >>> attention = ChunkedSparseAttention(PrefillConfig(chunk_size=1024))
    >>> out, scores, memory = attention(q, k, v)
    """

    chunk_size: int
    local_window: int
    heavy_budget: int
    sink_tokens: int
    dense_tail: int
    gqa_reduce: str

    def __init__(self, config: PrefillConfig | None = None) -> None:
        super().__init__()
        config = config or PrefillConfig()
        self.chunk_size = config.chunk_size
        self.local_window = config.local_window
        self.heavy_budget = config.heavy_budget
        self.sink_tokens = config.sink_tokens
        self.dense_tail = config.dense_tail
        self.gqa_reduce = config.gqa_reduce

    # TorchScript reads these annotations: it knows Optional, not the union with None.
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Optional[Tensor] = None,  # noqa: UP045
        memory: Optional[Tensor] = None,  # noqa: UP045
        last_chunk_begin: int = 0,
        scale: Optional[float] = None,  # noqa: UP045
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend with the queries of one call.

        Parameters
        ----------
        q : Tensor
            [B, Hq, Tq, D], after RoPE.
        k, v : Tensor
            [B, Hkv, T_total, D] and [B, Hkv, T_total, Dv], the whole history with the call's
            tokens.
        scores, memory, last_chunk_begin
            What the previous call of the prompt returned, and `next_chunk_begin` of it; nothing at
            first.

        Returns
        -------
        tuple of Tensor
            Output [B, Hq, Tq, Dv], scores [B, Hkv, T_total], memory int32 [B, Hkv, K + L + H].
        """
        return torch.ops.h2o_prefill.chunked_sparse_attention(
            q,
            k,
            v,
            scores,
            memory,
            None,
            None,
            None,
            last_chunk_begin,
            self.chunk_size,
            self.local_window,
            self.heavy_budget,
            self.sink_tokens,
            self.dense_tail,
            self.gqa_reduce,
            1,
            scale,
        )

    @torch.jit.export
    def next_chunk_begin(self, past: int, new: int) -> int:
        """Return where the last chunk of a call of `new` tokens behind `past` begins."""
        return past + (new - 1) // self.chunk_size * self.chunk_size
