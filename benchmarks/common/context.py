"""The C++ classes beside the operators below them (cpp/context.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.native import load


@dataclass(frozen=True)
class Pair:
    """Two ways to do the same in C++, and whether their last results were equal to the bit."""

    ours: Callable[[], None]
    baseline: Callable[[], None]
    same: Callable[[], bool]


@contextmanager
def dense_call(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Pair]:
    """Attend with the last tokens of a history through a PrefillContext, and by dense_attention."""
    for x in (q, k, v):
        if not x.transpose(1, 2).is_contiguous():
            raise ValueError(f"inputs must lie in memory as [T, H, D], got strides {x.stride()}")
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v)]
    sizes = [q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]]
    new = load("h2o_context").h2o_new_call
    arguments = (q.dtype == torch.bfloat16, *pointers, *map(ctypes.c_int64, sizes))
    with _held(new, arguments, "h2o_delete_call") as call:
        yield _pair(call, "h2o_attend", "h2o_dense", "h2o_same")


@contextmanager
def score_update(kv_heads: int, positions: int, memory: int) -> Iterator[Pair]:
    """Add column sums to the scores of a memory set: MemorySetTracker, and scatter_add_."""
    new = load("h2o_context").h2o_new_scores
    arguments = map(ctypes.c_int64, (kv_heads, positions, memory))
    with _held(new, tuple(arguments), "h2o_delete_scores") as scores:
        yield _pair(scores, "h2o_accumulate", "h2o_scatter_add", "h2o_same_scores")


@contextmanager
def _held(new: Any, arguments: tuple[Any, ...], delete: str) -> Iterator[ctypes.c_void_p]:
    new.restype = ctypes.c_void_p
    held = ctypes.c_void_p(new(*arguments))
    try:
        yield held
    finally:
        getattr(load("h2o_context"), delete)(held)


def _pair(held: ctypes.c_void_p, ours: str, baseline: str, same: str) -> Pair:
    def call(name: str, result: type[ctypes.c_bool] | None) -> Callable[[], Any]:
        function = getattr(load("h2o_context"), name)
        function.restype = result
        return lambda: function(held)

    return Pair(call(ours, None), call(baseline, None), call(same, ctypes.c_bool))
