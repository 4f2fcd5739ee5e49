"""What every operator returns, by shape and dtype alone: for torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig


def _fake(name: str) -> Callable[[Callable[[Any], Any]], None]:
    """Register a fake that gets the operator's arguments by the names of its schema.

    So that the argument lists stand in the schemas alone.
    """
    schema = getattr(torch.ops.h2o_prefill, name).default._schema

    def register(function: Callable[[Any], Any]) -> None:
        def fake(*args: Any, **kwargs: Any) -> Any:
            bound = {argument.name: argument.default_value for argument in schema.arguments}
            bound.update(zip(bound, args, strict=False))
            return function(SimpleNamespace(**(bound | kwargs)))

        torch.library.register_fake(f"h2o_prefill::{name}", fake)

    return register


@cache
def _memory_size(settings: str, layer: int) -> int:
    """K + L + H of a layer."""
    return PrefillConfig.parse(settings).of_layer(layer).memory_size


def _accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty_heads(q: Tensor, value_dim: int) -> Tensor:
    """[B, Hq, T, Dv] whose transpose(1, 2) is contiguous."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], value_dim).transpose(1, 2)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], dtype=_accumulate_dtype(q))


@_fake("intra_chunk_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    colsum = a.k.new_empty(a.k.shape[:3], dtype=_accumulate_dtype(a.q))
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q), colsum


@_fake("memory_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    colsum = a.q.new_empty(a.indices.shape, dtype=_accumulate_dtype(a.q))
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q), colsum


@_fake("dense_attention")
def _(a: Any) -> Tensor:
    return _empty_heads(a.q, a.v.shape[3])


@_fake("merge_states")
def _(a: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads(a.out_a, a.out_a.shape[3]), a.lse_a.new_empty(a.lse_a.shape)


@_fake("select_memory")
def _(a: Any) -> Tensor:
    return a.memory.new_empty(*a.memory.shape[:2], a.sink_tokens + a.local_window + a.heavy_budget)


@_fake("accumulate_scores_")
def _(a: Any) -> None:
    return None


@_fake("gather_rows")
def _(a: Any) -> Tensor:
    return a.x.new_empty(*a.x.shape[:2], a.indices.shape[2], a.x.shape[3])


@_fake("chunked_sparse_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = a.k.new_empty(a.k.shape[:3], dtype=_accumulate_dtype(a.q))
    width = a.sink_tokens + a.local_window + a.heavy_budget
    memory = a.k.new_empty(*a.k.shape[:2], width, dtype=torch.int32)
    return _empty_heads(a.q, a.v.shape[3]), scores, memory


@_fake("prefill_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = a.k.new_empty(a.k.shape[:3], dtype=_accumulate_dtype(a.q))
    width = _memory_size(a.settings, a.layer)
    memory = a.k.new_empty(*a.k.shape[:2], width, dtype=torch.int32)
    return _empty_heads(a.q, a.v.shape[3]), scores, memory


@_fake("prefill_attention_")
def _(a: Any) -> Tensor:
    return _empty_heads(a.q, a.v.shape[3])


@_fake("advance_position_")
def _(a: Any) -> None:
    return None


@_fake("lexical_recall")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = a.token_ids.shape
    blocks = (length - a.begin + a.block - 1) // a.block
    found = torch.library.get_ctx().new_dynamic_size()
    offsets = a.token_ids.new_empty(batch * blocks + 1, dtype=torch.int32)
    return (
        offsets,
        a.token_ids.new_empty(found, dtype=torch.int32),
        a.token_ids.new_empty(found, dtype=torch.int32),
    )
