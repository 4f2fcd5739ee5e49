"""The sparse way: one op a layer, and the state that the cache keeps of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import LogitOptions, RecallLists, sparse_attention
from h2o_prefill.hf.cache import StaticPrefillLayer
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.dense import dense_attention
from h2o_prefill.hf.forward import ALL_ROWS
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import Padding, Span, is_long_row


def attend_sparsely(call: Call) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it."""
    padding, layer, options = call.padding, call.cache_layer, call.logit_options
    if padding is not None:
        return _attend_padded(call, padding)
    assert call.context is not None  # Else it is dense.
    rows, total = call.prompt_rows, call.past + call.prompt_rows
    query, key, value = in_autocast_dtype(call.query, *call.held)
    prompt, number = query[:, :, :rows], call.layer or 0  # No setting depends on a missing number.
    if isinstance(layer, StaticPrefillLayer):
        assert call.context.call is not None
        out = layer.attend(prompt, call.context.call, number, options)
        return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()
    recall = _recall_lists(call)
    if layer is not None:
        call.context.keep_state(layer)
    if layer is not None and layer.holds(key, value):
        out = layer.attend(prompt, total, recall, number, call.config, options)
    else:
        state = None if layer is None else layer.state
        config = call.config.of_layer(call.layer)
        out, state = sparse_attention(
            prompt, key[:, :, :total], value[:, :, :total], state, config, recall, *options
        )
        if layer is not None:
            layer.state = state
    return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()


def _attend_padded(call: Call, padding: Padding) -> Tensor:
    """Attend in a padded batch: in every row as if it were alone, so that none sees padding.

    The operators take rows of one length, so those that lie in the same place go together. No state
    is kept: its positions would be other tokens in every row.
    """
    config, options = call.config.of_layer(call.layer), call.logit_options
    query, key, value = in_autocast_dtype(call.query, call.key, call.value)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for (first, end), rows in padding.groups().items():
        if not padding.fits((first, end)):
            assert padding.mask is not None
            parts = {name: getattr(call, name)[rows] for name in ("query", "key", "value", "mask")}
            dense = dense_attention(replace(call, **parts))[0]
            out[rows, first:end] = dense[:, first:end].to(out.dtype)
            continue
        q, k, v = (x[:, :, first:end][rows] for x in (query, key, value))
        length = min(end, call.prompt_rows) - first
        if is_long_row(length, call.config):
            recall = _recall_lists(call, (first, end), rows)
            prompt, keys, values = (x[:, :, :length] for x in (q, k, v))
            attended, _ = sparse_attention(prompt, keys, values, None, config, recall, *options)
            attended = with_candidates(attended, q, k, v, options)
        else:
            attended = ops.dense_attention(q, k, v, *options)
        out[rows, first:end] = attended.transpose(1, 2)
    if isinstance(call.cache_layer, ChunkedPrefillLayer):
        call.cache_layer.padded = True
    return out


def with_candidates(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: LogitOptions
) -> Tensor:
    """Append the rows of `query`, which verify candidates, to those of `out`.

    They attend as decoded tokens do, and leave no trace in the state.
    """
    rows = out.shape[2]
    if rows == query.shape[2]:
        return out
    return torch.cat([out, ops.dense_attention(query[:, :, rows:], key, value, *options)], dim=2)


def _recall_lists(
    call: Call, span: Span | None = None, rows: slice | list[int] = ALL_ROWS
) -> RecallLists:
    assert call.context is not None
    batch, device = call.query.shape[0], call.query.device
    return call.context.recall_lists(batch, call.past, call.new, device, span, rows)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention: RoPE leaves fp32 queries beside 16-bit values."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
