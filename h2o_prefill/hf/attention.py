"""The attention function named `h2o_prefill`: sparse where allowed, else dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import LayerOptions, sparse_attention
from h2o_prefill.hf.cache import StaticPrefillLayer
from h2o_prefill.hf.call import Attended, Call
from h2o_prefill.hf.dense import attend_densely, in_autocast_dtype, mask_in_graph, with_candidates
from h2o_prefill.hf.forward import call_in_graph
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.rules import dense_reason


def h2o_prefill_attention(*args: Any, **kwargs: Any) -> Attended:
    """Attend; takes the arguments of `Call.of`, as transformers passes them."""
    told = call_in_graph()
    if told is not None:
        call = Call.of(*args, **kwargs)
        # No mask may mean anything, if it was not our mask function that made none.
        if isinstance(call.mask, Tensor) or told.plain:
            return _attend(call)
    return _attend_outside_of_graphs(*args, **kwargs)


# What is not settled before the forward needs its context, which dynamo cannot trace: a compiled
# model breaks its graph here.
@torch.compiler.disable
def _attend_outside_of_graphs(*args: Any, **kwargs: Any) -> Attended:
    return _attend(Call.of(*args, **kwargs))


def _attend(call: Call) -> Attended:
    """Attend sparsely where no rule forbids it, by the operators where the settings say dense."""
    reason = dense_reason(call)
    call.count(reason)
    foreign = call.config.exact and call.graph is None and call.query.device.type != "cpu"
    if reason is not None or foreign:
        return attend_densely(call)
    layer, options = call.cache_layer, call.logit_options
    query, key, value = in_autocast_dtype(call.query, *call.held)
    prompt = query[:, :, : call.prompt_rows]
    if isinstance(layer, StaticPrefillLayer):
        out = _attend_in_static_cache(call, layer, prompt)
        if call.graph is not None and prompt.shape[2] < call.new:
            # In a graph, keys and values go on after the candidates.
            mask = mask_in_graph(call)[:, :, prompt.shape[2] :]
            last = replace(call, query=query[:, :, prompt.shape[2] :], mask=mask)
            candidates = attend_densely(last)[0]
            return torch.cat([out.transpose(1, 2), candidates], dim=1).contiguous(), None
    elif call.config.exact:
        out = ops.dense_attention(query, key, value, *options)
    else:
        out = _attend_sparsely(call, prompt, key, value)
    return with_candidates(out, query, key, value, options).transpose(1, 2).contiguous(), None


def _attend_in_static_cache(call: Call, layer: StaticPrefillLayer, prompt: Tensor) -> Tensor:
    told = call.graph if call.context is None else call.context.call
    assert told is not None and told.position is not None
    given = LayerOptions(told.recall, call.number, told.settings, call.logit_options)
    out = layer.attend(prompt, told.position, given)
    if call.graph is None:
        call.enabled.note_errors(call.layer, layer.errors)
    return out


def _attend_sparsely(call: Call, prompt: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it."""
    assert call.context is not None  # Else it is dense.
    layer, config = call.cache_layer, call.config
    assert layer is None or isinstance(layer, ChunkedPrefillLayer)
    if layer is not None:
        call.context.was_sparse = True
    total, batch = call.past + prompt.shape[2], prompt.shape[0]
    recall = call.context.recall_lists(batch, call.past, call.new, prompt.device)
    if layer is not None and layer.holds(key, value):
        told = LayerOptions(recall, call.number, config.to_string(), call.logit_options)
        out = layer.attend(prompt, total, config, told)
        call.enabled.note_errors(call.layer, layer.errors)
        return out
    keys, values, before = key[:, :, :total], value[:, :, :total], getattr(layer, "state", None)
    given = config.of_layer(call.layer), recall, *call.logit_options
    out, state = sparse_attention(prompt, keys, values, before, *given)
    if layer is not None:
        layer.state = state
    call.enabled.note_errors(call.layer, state.errors)
    return out
