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
from h2o_prefill.hf.forward import ALL_ROWS, call_in_graph
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import Padding, Rows, Span, is_long_row
from h2o_prefill.hf.rules import dense_reason
from h2o_prefill.hf.sharded import ShardedLayer, attend_sharded
from h2o_prefill.state import no_errors


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
    layer = None if call.context is None else call.context.layer_of(call.module)
    if isinstance(layer, ShardedLayer):
        return attend_sharded(call, layer), None
    reason, exact = dense_reason(call), call.config.exact
    if call.context is not None:
        rows = call.query.shape[0] * call.new
        call.enabled.count(getattr(call.module, "layer_idx", None), rows, "" if exact else reason)
    if exact:
        ours = reason is None and call.query.device.type == "cpu"
        return (_attend_exactly(call), None) if ours else dense_attention(call)
    if reason is None:
        return _attend_sparsely(call), None
    if reason:
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
        forward = call.context.call
        assert forward is not None and forward.position is not None
        given = forward.position, forward.recall, number, forward.settings
        out = layer.attend(prompt, *given, options)
        call.enabled.note_errors(call.layer, layer.errors)
        return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()
    recall = _recall_lists(call)
    if layer is not None:
        call.context.keep_state(layer)
    select = call.enabled.select
    if layer is not None and select is None and layer.holds(key, value):
        out = layer.attend(prompt, total, recall, number, call.config, options)
        call.enabled.note_errors(call.layer, layer.errors)
    else:
        state = None if layer is None else layer.state
        config = call.config.of_layer(call.layer)
        keys, values = key[:, :, :total], value[:, :, :total]
        out, state = sparse_attention(
            prompt, keys, values, state, config, recall, *options, call.layer, select
        )
        if layer is not None:
            layer.state = state
        call.enabled.note_errors(call.layer, state.errors)
    return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()


def _attend_padded(call: Call, padding: Padding) -> Tensor:
    """Attend in a padded batch: every row is computed as if it were alone, without its padding.

    No state is kept, since its positions would be other tokens in every row, but for the errors.
    """
    config, options = call.config.of_layer(call.layer), call.logit_options
    select = call.enabled.select
    errors = no_errors(call.key)

    def attend_rows(q: Tensor, k: Tensor, v: Tensor, span: Span, rows: Rows) -> Tensor:
        first, end = span
        length = min(end, call.prompt_rows) - first
        if not padding.fits(span):
            return call.attend_in_window(q, k, v, end - first)
        if call.config.exact or not is_long_row(length, call.config):
            return ops.dense_attention(q, k, v, *options)
        recall = _recall_lists(call, span, rows)
        prompt, keys, values = (x[:, :, :length] for x in (q, k, v))
        out, state = sparse_attention(
            prompt, keys, values, None, config, recall, *options, call.layer, select
        )
        errors[rows] = state.errors
        return with_candidates(out, q, k, v, options)

    query, key, value = in_autocast_dtype(call.query, call.key, call.value)
    out = padding.attend(query, key, value, attend_rows)
    if not call.config.exact:
        call.enabled.note_errors(call.layer, errors)
    if isinstance(call.cache_layer, ChunkedPrefillLayer):
        call.cache_layer.padded = True
    return out


def _recall_lists(call: Call, span: Span | None = None, rows: Rows = ALL_ROWS) -> RecallLists:
    assert call.context is not None
    batch, device = call.query.shape[0], call.query.device
    return call.context.recall_lists(batch, call.past, call.new, device, span, rows)
