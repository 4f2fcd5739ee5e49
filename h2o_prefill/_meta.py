"""Fake (meta) implementations of the operators, for torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.state import no_errors, score_dtype

_Native = torch.classes.h2o_prefill.PrefillConfig


def _fake(name: str) -> Callable[[Callable[[Any], Any]], None]:
    """Register a fake that takes the operator's arguments as attributes, named as in the schema."""
    schema = getattr(torch.ops.h2o_prefill, name).default._schema

    def register(function: Callable[[Any], Any]) -> None:
        def fake(*args: Any, **kwargs: Any) -> Any:
            bound = {argument.name: argument.default_value for argument in schema.arguments}
            bound.update(zip(bound, args, strict=False))
            bound.update(kwargs)
            for argument in schema.arguments:
                if bound[argument.name] is None and isinstance(argument.type, torch.TensorType):
                    raise ValueError(f"{argument.name} must be a tensor, got none")
            _check_sizes(name, bound)
            return function(SimpleNamespace(**bound))

        torch.library.register_fake(f"h2o_prefill::{name}", fake)

    return register


# The sizes that tensors of an operator have in common, a letter each.
_OF_CALL, _OF_HISTORY = "q:BHTD k:BGTD v:BGTE", "q:BHTD k:BGSD v:BGSE"
_STATE = "scores:BG_ memory:BG_ errors:BG_"
_SIZES = {
    "intra_chunk_attention": _OF_CALL,
    "memory_attention": f"{_OF_HISTORY} indices:BG_",
    "dense_attention": _OF_HISTORY,
    "sliding_window_attention": _OF_HISTORY,
    "merge_states": "out_a:BHTD out_b:BHTD lse_a:BHT lse_b:BHT",
    "select_memory": "scores:BG_ memory:BG_",
    "gather_rows": "x:BG__ indices:BG_",
    "pack_linear": "weight:__",
    "linear": "packed:___ scales:_ bias:_",
    "packed_embedding": "packed:___ scales:_",
    "chunked_sparse_attention": f"{_OF_HISTORY} {_STATE}",
    "prefill_attention": f"{_OF_HISTORY} {_STATE}",
    "prefill_attention_": f"{_OF_CALL} cache_key:BGCD cache_value:BGCE {_STATE}",
    "accumulate_scores_": "scores:BG_ memory:BGM colsum:BGM",
    "chunkwise_linear_attention": _OF_CALL,
    "chunkwise_linear_attention_backward": _OF_CALL,
}


def _check_sizes(operator: str, arguments: dict[str, Any]) -> None:
    """Refuse the sizes that the operator refuses, so that tracing fails as execution would."""
    known: dict[str, Any] = {}
    for name, letters in (x.split(":") for x in _SIZES.get(operator, "").split()):
        if (x := arguments[name]) is None:
            continue
        shape = "must have dimensions " + ", ".join(letters.replace("_", "*"))
        message = f"{name} {shape} with the sizes of other arguments, got {list(x.shape)}"
        torch._check_value(x.dim() == len(letters), lambda m=message: m)
        for letter, size in zip(letters, x.shape, strict=True):
            if letter != "_":
                torch._check_value(known.setdefault(letter, size) == size, lambda m=message: m)


_settings = cache(_Native.parse)


def _empty_heads(q: Tensor, value_dim: int) -> Tensor:
    """[B, Hq, T, Dv] whose transpose(1, 2) is contiguous."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], value_dim).transpose(1, 2)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], dtype=score_dtype(q))


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    check = torch._check_value
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(
            x.dtype == q.dtype and x.device == q.device,
            lambda n=name: f"{n} must have dtype and device of q",
        )
        check(x.shape[1] > 0, lambda n=name: f"{n} must have heads in dimension 1")
        check(x.shape[3] > 0, lambda n=name: f"{n} must have a head dim > 0")
    check(
        q.shape[1] % k.shape[1] == 0, lambda: "the query heads must be a multiple of the KV heads"
    )


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is not None:
        torch._check_value(
            sinks.shape == q.shape[1:2] and sinks.device == q.device,
            lambda: "sinks must have one entry a query head, on the device of q",
        )


def _check_attention(a: Any) -> None:
    _check_qkv(a.q, a.k, a.v)
    torch._check_value(
        a.k.shape[2] >= a.q.shape[2], lambda: "k must hold the history with the call's tokens"
    )
    _check_sinks(a.sinks, a.q)


def _empty_sparse(a: Any, memory_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, scores, memory set and errors of a sparse prefill."""
    scores = a.k.new_empty(a.k.shape[:3], dtype=score_dtype(a.q))
    memory = a.k.new_empty(*a.k.shape[:2], memory_size, dtype=torch.int32)
    return _empty_heads(a.q, a.v.shape[3]), scores, memory, no_errors(a.k)


@_fake("intra_chunk_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_qkv(a.q, a.k, a.v)
    colsum = a.k.new_empty(a.k.shape[:3], dtype=score_dtype(a.q))
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q), colsum


@_fake("memory_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_qkv(a.q, a.k, a.v)
    colsum = a.q.new_empty(a.indices.shape, dtype=score_dtype(a.q))
    return _empty_heads(a.q, a.v.shape[3]), _empty_lse(a.q), colsum


@_fake("dense_attention")
def _(a: Any) -> Tensor:
    _check_attention(a)
    return _empty_heads(a.q, a.v.shape[3])


@_fake("sliding_window_attention")
def _(a: Any) -> tuple[Tensor, Tensor]:
    _check_attention(a)
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
    _check_attention(a)
    return _empty_sparse(a, _settings(a.settings).memory_size())


@_fake("prefill_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_attention(a)
    return _empty_sparse(a, _settings(a.settings).of_layer(a.layer).memory_size())


@_fake("prefill_attention_")
def _(a: Any) -> Tensor:
    _check_qkv(a.q, a.k, a.v)
    _check_sinks(a.sinks, a.q)
    return _empty_heads(a.q, a.v.shape[3])


for _name in ("accumulate_scores_", "advance_position_"):
    _fake(_name)(lambda a: None)


def _check_accumulated(name: str, x: Tensor | None, q: Tensor, *shape: int) -> None:
    if x is not None:
        dtype = score_dtype(q)
        torch._check_value(
            tuple(x.shape) == shape and x.dtype == dtype and x.device == q.device,
            lambda: f"{name} must be {dtype} {list(shape)} on the device of q, got {x.shape}",
        )


def _check_linear_attention(a: Any) -> None:
    _check_qkv(a.q, a.k, a.v)
    batch, heads, length, dim = a.k.shape
    by_head = a.log_decay is not None and a.log_decay.dim() == 1
    decays = (heads,) if by_head else (batch, heads, length)
    _check_accumulated("log_decay", a.log_decay, a.q, *decays)
    _check_accumulated("initial_state", a.initial_state, a.q, batch, heads, dim, a.v.shape[3])
    _check_accumulated("initial_normalizer", a.initial_normalizer, a.q, batch, heads, dim)


@_fake("chunkwise_linear_attention")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_linear_attention(a)
    dtype = score_dtype(a.q)
    per_head = a.k.shape[:2]
    state = a.k.new_empty(*per_head, a.k.shape[3], a.v.shape[3], dtype=dtype)
    normalizer = a.k.new_empty(*per_head, a.k.shape[3] if a.normalize else 0, dtype=dtype)
    return _empty_heads(a.q, a.v.shape[3]), state, normalizer


@_fake("chunkwise_linear_attention_backward")
def _(a: Any) -> tuple[Tensor, ...]:
    _check_linear_attention(a)

    def like(x: Tensor | None) -> Tensor:
        shape = [0] if x is None else x.shape
        return a.q.new_empty(shape, dtype=score_dtype(a.q))

    states = (a.log_decay, a.initial_state, a.initial_normalizer)
    floats = (a.q.new_empty(a.q.shape), a.k.new_empty(a.k.shape), a.v.new_empty(a.v.shape))
    return (*floats, *(like(x) for x in states))


def _recall_lists(token_ids: Tensor, num_tokens: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Recall lists of the last `num_tokens` of token_ids [B, T]; their length depends on data."""
    blocks = (num_tokens + block - 1) // block
    found = torch.library.get_ctx().new_dynamic_size()
    sizes = token_ids.shape[0] * blocks + 1, found, found
    offsets, positions, visible_from = (token_ids.new_empty(x, dtype=torch.int32) for x in sizes)
    return offsets, positions, visible_from


@_fake("lexical_recall")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    block = _settings(a.settings).recall_block()
    return _recall_lists(a.token_ids, a.token_ids.shape[1] - a.begin, block)


@_fake("recall_at_position")
def _(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _recall_lists(a.token_ids, a.num_tokens, _settings(a.settings).recall_block())
