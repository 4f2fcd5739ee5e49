"""Fake (meta) implementations of the operators: shapes and dtypes, for torch.compile and export.

Arguments are checked when a call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.state import no_errors, score_dtype

_settings = cache(torch.classes.h2o_prefill.PrefillConfig.parse)


def _fake(*names: str) -> Callable[[Callable[[Any], Any]], None]:
    """Register a fake that takes the operator's arguments as attributes, named as in the schema."""

    def register(function: Callable[[Any], Any]) -> None:
        for name in names:
            torch.library.register_fake(f"h2o_prefill::{name}", _with_names(name, function))

    return register


def _with_names(operator: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    arguments = getattr(torch.ops.h2o_prefill, operator).default._schema.arguments
    defaults = {x.name: x.default_value for x in arguments}
    tensors = [x.name for x in arguments if isinstance(x.type, torch.TensorType)]

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        for name in tensors:
            if values[name] is None:
                raise ValueError(f"{name} must be a tensor, got none")
        return function(SimpleNamespace(**values))

    return fake


def _empty_heads(q: Tensor, value_dim: int) -> Tensor:
    """[B, Hq, T, Dv] whose transpose(1, 2) is contiguous."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], value_dim).transpose(1, 2)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=score_dtype(q))


@_fake("intra_chunk_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    colsum = a.k.new_empty(a.k.shape[:3], dtype=score_dtype(a.q))
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q), colsum


@_fake("memory_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    colsum = a.q.new_empty(a.indices.shape, dtype=score_dtype(a.q))
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q), colsum


@_fake("dense_attention")
def _(a: Any) -> Tensor:
    return _empty_heads(a.q, a.v.shape[3])


@_fake("sliding_window_attention")
def _(a: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q)


@_fake("merge_states")
def _(a: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads(a.out_a, a.out_a.shape[3]), a.lse_a.new_empty(a.lse_a.shape)


@_fake("select_memory")
def _(a: Any) -> Tensor:
    return a.memory.new_empty(*a.memory.shape[:2], a.sink_tokens + a.local_window + a.heavy_budget)


@_fake("gather_rows")
def _(a: Any) -> Tensor:
    return a.x.new_empty(*a.x.shape[:2], a.indices.shape[2], a.x.shape[3])


@_fake("pack_linear")
def _(a: Any) -> tuple[Tensor, Tensor]:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
    (outputs, inputs), dtype = a.weight.shape, dtypes[a.format]
    packed = a.weight.new_empty((outputs + 15) // 16, inputs, 16, dtype=dtype)
    scales = outputs if a.format == "int8" else 0
    return packed, a.weight.new_empty(scales, dtype=torch.float32)


@_fake("linear")
def _(a: Any) -> Tensor:
    torch._check_value(
        a.x.shape[-1] == a.packed.shape[1],
        lambda: f"x must have the inputs of packed ({a.packed.shape[1]}), got {list(a.x.shape)}",
    )
    return a.x.new_empty(*a.x.shape[:-1], a.outputs)


@_fake("packed_embedding")
def _(a: Any) -> Tensor:
    return a.scales.new_empty(*a.ids.shape, a.packed.shape[1])


@_fake("chunked_sparse_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = a.k.new_empty(a.k.shape[:3], dtype=score_dtype(a.q))
    memory_size = _settings(a.settings).memory_size()
    memory = a.k.new_empty(*a.k.shape[:2], memory_size, dtype=torch.int32)
    return _empty_heads(a.q, a.v.shape[3]), scores, memory, no_errors(a.k)


@_fake("prefill_attention_")
def _(a: Any) -> Tensor:
    return _empty_heads(a.q, a.cache_value.shape[3])


@_fake("paged_sparse_attention_")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    config = _settings(a.settings)
    count = a.checkpoints if config.is_sparse(a.layer, 0, config.sparse_from()) else 0
    shape, size = (count, 1, a.key_pages.shape[1]), config.of_layer(a.layer).memory_size()
    memory = a.q.new_empty(*shape, size, dtype=torch.int32)
    scores = a.q.new_empty(*shape, size, dtype=score_dtype(a.q))
    return memory, scores, a.q.new_empty(*shape, 4, dtype=torch.float32)


@_fake("accumulate_scores_", "advance_position_")
def _(a: Any) -> None:
    pass


@_fake("chunkwise_linear_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, _, dim), dtype = a.k.shape, score_dtype(a.q)
    state = a.k.new_empty(batch, heads, dim, a.v.shape[3], dtype=dtype)
    normalizer = a.k.new_empty(batch, heads, dim if a.normalize else 0, dtype=dtype)
    return _empty_heads(a.q, a.v.shape[3]), state, normalizer


@_fake("chunkwise_linear_attention_backward")
def _(a: Any) -> tuple[Tensor, ...]:
    states = (a.log_decay, a.initial_state, a.initial_normalizer)
    shapes = ([0] if x is None else x.shape for x in states)
    gradients = (a.q.new_empty(shape, dtype=score_dtype(a.q)) for shape in shapes)
    return (*(x.new_empty(x.shape) for x in (a.q, a.k, a.v)), *gradients)


@_fake("lexical_recall", "recall_at_position")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens = a.num_tokens if hasattr(a, "num_tokens") else a.token_ids.shape[1] - a.begin
    block = _settings(a.settings).recall_block()
    entries = torch.library.get_ctx().new_dynamic_size()  # depends on data
    sizes = a.token_ids.shape[0] * ((tokens + block - 1) // block) + 1, entries, entries
    offsets, positions, visible_from = (a.token_ids.new_empty(x, dtype=torch.int32) for x in sizes)
    return offsets, positions, visible_from
