"""The attention function named `h2o_prefill`: sparse where allowed, else dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import RecallLists, sparse_attention
from h2o_prefill.hf.cache import StaticPrefillLayer
from h2o_prefill.hf.call import Attended, Call, as_attention_function
from h2o_prefill.hf.compiled import attend_in_graph
from h2o_prefill.hf.dense import dense_attention, in_autocast_dtype, with_candidates
from h2o_prefill.hf.forward import ALL_ROWS
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import Padding, Span, is_long_row
from h2o_prefill.hf.rules import dense_reason
from h2o_prefill.hf.state import call_in_graph


def h2o_prefill_attention(*args: Any, **kwargs: Any) -> Attended:
    """Attend; the arguments are those of `Call.of`, as transformers passes them."""
    forward = call_in_graph()
    if forward is not None:
        call = Call.of(*args, **kwargs)
        # No mask may mean anything, if it was not our mask function that made none.
        if isinstance(call.mask, Tensor) or forward.plain:
            return attend_in_graph(call, forward)
    return _attend(*args, **kwargs)


# Dynamo cannot trace context variables: a compiled model breaks its graph here.
@torch.compiler.disable
@as_attention_function
def _attend(call: Call) -> Attended:
    reason, exact = dense_reason(call), call.config.exact
    if call.context is not None:
        rows = call.query.shape[0] * call.new
        call.enabled.count(getattr(call.module, "layer_idx", None), rows, "" if exact else reason)
    if exact and reason is None and call.query.device.type == "cpu":
        return _attend_exactly(call), None
    if reason is None and not exact:
        return _attend_sparsely(call), None
    if reason and not exact:
        call.enabled.report(f"dense attention: {reason}")
    return dense_attention(call)


def _attend_exactly(call: Call) -> Tensor:
    """Prefill one layer densely, with sinks, softcap and padded rows, by our kernels."""
    if call.padding is not None:
        return _attend_padded(call, call.padding)
    query, key, value = in_autocast_dtype(call.query, *call.held)
    return ops.dense_attention(query, key, value, *call.logit_options).transpose(1, 2)


def _attend_sparsely(call: Call) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it."""
    padding, layer, options = call.padding, call.cache_layer, call.logit_options
    if padding is not None:
        return _attend_padded(call, padding)
    assert call.context is not None  # Else it is dense.
    rows, total = call.prompt_rows, call.past + call.prompt_rows
    query, key, value = in_autocast_dtype(call.query, *call.held)
    prompt, number = query[:, :, :rows], call.number
    if isinstance(layer, StaticPrefillLayer):
        assert call.context.call is not None
        out = layer.attend(prompt, call.context.call, number, options)
        call.enabled.note_errors(call.layer, layer.errors)
        return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()
    recall = _recall_lists(call)
    if layer is not None:
        call.context.keep_state(layer)
    if layer is not None and layer.holds(key, value):
        out = layer.attend(prompt, total, recall, number, call.config, options)
        call.enabled.note_errors(call.layer, layer.errors)
    else:
        state = None if layer is None else layer.state
        config = call.config.of_layer(call.layer)
        out, state = sparse_attention(
            prompt, key[:, :, :total], value[:, :, :total], state, config, recall, *options
        )
        if layer is not None:
            layer.state = state
        call.enabled.note_errors(call.layer, state.errors)
    return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()


def _attend_padded(call: Call, padding: Padding) -> Tensor:
    """Attend in a padded batch: every row is computed as if it were alone, without its padding.

    The operators take rows of one length, so those that lie in the same place go together. No state
    is kept: its positions would be other tokens in every row.
    """
    config, options = call.config.of_layer(call.layer), call.logit_options
    query, key, value = in_autocast_dtype(call.query, call.key, call.value)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for (first, end), rows in padding.groups().items():
        q, k, v = (x[:, :, first:end][rows] for x in (query, key, value))
        length = min(end, call.prompt_rows) - first
        if not padding.fits((first, end)):
            attended = call.attend_in_window(q, k, v, end - first)
        elif not call.config.exact and is_long_row(length, call.config):
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


def _recall_lists(
    call: Call, span: Span | None = None, rows: slice | list[int] = ALL_ROWS
) -> RecallLists:
    assert call.context is not None
    batch, device = call.query.shape[0], call.query.device
    return call.context.recall_lists(batch, call.past, call.new, device, span, rows)
