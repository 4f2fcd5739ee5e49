"""The attention function named `h2o_prefill`: sparse where allowed, else dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import LayerOptions
from h2o_prefill.hf.call import GRAPH_BREAK, Attended, Call
from h2o_prefill.hf.dense import attend_densely, in_autocast_dtype
from h2o_prefill.hf.forward import call_in_graph
from h2o_prefill.hf.layer import StaticPrefillLayer
from h2o_prefill.hf.rules import dense_reason
from h2o_prefill.state import LayerState


def h2o_prefill_attention(*args: Any, **kwargs: Any) -> Attended:
    """Attend; takes the arguments of `Call.of`, as transformers passes them."""
    if call_in_graph() is not None:
        call = Call.of(*args, **kwargs)
        # No mask may mean anything, if it was not our mask function that made none.
        if call.mask is not None or call.left_out is not None:
            return _attend(call)
    return _attend_outside_of_graphs(*args, **kwargs)


# What is not settled before the forward needs its context, which dynamo cannot trace: a compiled
# model breaks its graph here.
@torch.compiler.disable(reason=GRAPH_BREAK)
def _attend_outside_of_graphs(*args: Any, **kwargs: Any) -> Attended:
    return _attend(Call.of(*args, **kwargs))


def _attend(call: Call) -> Attended:
    """Attend sparsely where no rule forbids it, by the operators where the settings say dense."""
    reason = dense_reason(call)
    call.count(reason)
    foreign = call.config.exact and call.graph is None and call.query.device.type != "cpu"
    if reason is not None or foreign:
        return attend_densely(call)
    query, key, value = in_autocast_dtype(call.query, *call.used)
    rows = call.prompt_rows
    if call.config.exact and not isinstance(call.cache_layer, StaticPrefillLayer):
        out = ops.dense_attention(query, key, value, *call.logit_options)
        return out.transpose(1, 2), None
    out = _attend_sparsely(call, query[:, :, :rows], key, value)
    if rows == call.new:
        return out.transpose(1, 2).contiguous(), None
    # Rows that verify candidates attend as decoded tokens, without a trace.
    last = ops.dense_attention(query[:, :, rows:], key, value, *call.logit_options)
    return torch.cat([out, last], dim=2).transpose(1, 2), None


def _attend_sparsely(call: Call, prompt: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it."""
    layer, config, logits = call.cache_layer, call.config, call.logit_options
    settled = call.graph if call.context is None else call.context.call
    if isinstance(layer, StaticPrefillLayer):
        assert settled is not None
        options = LayerOptions(settled.recall, call.number, settled.settings, logits)
        out = layer.attend(prompt, settled.position, options)
        if call.graph is None:
            call.enabled.note_errors(call.layer, layer.errors)
        return out
    assert call.context is not None  # Else it is dense.
    total = call.past + prompt.shape[2]
    recall = call.context.recall_lists(len(prompt), call.past, call.new, prompt.device)
    options = LayerOptions(recall, call.number, config.to_string(), logits)
    call.context.was_sparse = True
    state = LayerState() if layer is None else layer.synchronized()
    if layer is not None and layer.holds(key, value):
        out = state.attend(prompt, *options.arguments, total)
    else:
        # There is no cache, or it holds something else, such as latents.
        history = key[:, :, :total], value[:, :, :total]
        out = state.attend_history(prompt, *history, *options.arguments)
    call.enabled.note_errors(call.layer, state.errors)
    return out
