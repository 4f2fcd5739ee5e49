"""The attention step of the CPU operators, with column sums or without (cpp/colsum.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from common.native import load

# DType of csrc/kernels/params.h.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, colsum: bool, indices: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend with one chunk, causally to itself or to the listed keys."""
    for x in (q, k, v):
        if not x.transpose(1, 2).is_contiguous():
            raise ValueError(f"inputs must lie in memory as [T, H, D], got strides {x.stride()}")
    _, query_heads, rows, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    width = 0 if indices is None else indices.shape[2]
    out = torch.empty(1, rows, query_heads, dim, dtype=q.dtype).transpose(1, 2)
    lse = torch.empty(1, query_heads, rows)
    sums = torch.empty(1, kv_heads, width or keys) if colsum else None
    function = load("h2o_colsum").h2o_attend_chunk
    function.argtypes = (
        [ctypes.c_int] + [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 6 + [ctypes.c_float]
    )
    function.restype = None
    pointers = [None if x is None else x.data_ptr() for x in (q, k, v, out, lse, sums, indices)]
    sizes = [width, query_heads, kv_heads, rows, keys, dim]
    function(_DTYPES[q.dtype], *pointers, *sizes, dim**-0.5)
    return out, lse, sums
