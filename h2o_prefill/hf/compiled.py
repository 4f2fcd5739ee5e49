"""Masks and attention in a compiled graph: nothing here may break it.

Decisions that depend on the content of tensors are made before the forward, and read from its
`GraphCall`. With a static cache the graph has one operator for calls of any length:
`ops.prefill_attention_`, which is sparse or dense as the settings say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function as sliding_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_prefill import ops
from h2o_prefill.hf.cache import StaticPrefillLayer
from h2o_prefill.hf.call import Attended, Call
from h2o_prefill.hf.dense import (
    EAGER_ONLY,
    as_additive,
    call_function,
    eager_function,
    in_autocast_dtype,
    suits_our_operators,
    with_candidates,
)
from h2o_prefill.hf.forward import GraphCall
from h2o_prefill.hf.kinds import layer_type, window_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer, graph
from h2o_prefill.hf.rules import LAYER_RULES, MASKED, OTHER_VALUES, dense_reason

# The attribute of masks that are plain causal. A graph that needs no mask does not compute it.
_PLAIN = "_h2o_prefill_plain"
# That of masks of a sliding window: its length. The last key is that of the last query.
_WINDOW = "_h2o_prefill_window"

Layer = ChunkedPrefillLayer | StaticPrefillLayer | None


def may_be_left_out(arguments: dict[str, Any]) -> bool:
    """Return whether a mask function may leave out a mask that is plain causal."""
    return arguments.get("allow_is_causal_skip", True) and not arguments.get("use_vmap", False)


def ends_differ(arguments: dict[str, Any]) -> bool:
    """Return whether the last key is another token than the last query, or may be."""
    offset = arguments["q_offset"]
    end = arguments["kv_offset"] + arguments["kv_length"]
    return isinstance(offset, Tensor) or offset + arguments["q_length"] != end


def mask_in_graph(arguments: dict[str, Any], forward: GraphCall) -> Tensor:
    """Return the bool mask of PyTorch's attention, marked if it is plain causal."""
    given = arguments["attention_mask"]
    if given is not None and forward.unpadded:
        forward.hidden.append(_hides_keys(given, arguments["q_offset"] + arguments["q_length"]))
        given = None
    changed = {"attention_mask": given, "allow_is_causal_skip": False}
    mask = sdpa_mask(**{**arguments, **changed})
    assert mask is not None
    if given is None and may_be_left_out(arguments):
        window = arguments.get("local_size")
        if window is not None and not ends_differ(arguments):
            setattr(mask, _WINDOW, window)
        elif window is None and arguments["mask_function"] is causal_mask_function:
            setattr(mask, _PLAIN, True)
    return mask


def attend_in_graph(call: Call, forward: GraphCall) -> Attended:
    """Attend as the attention function does."""
    layer: Layer = graph.layer
    graph.layer = None
    if layer is not None and layer.keys is not call.key:
        layer = None
    number = call.number
    reason = _why_dense(call, forward, layer)
    forward.outcomes.append((number, reason))
    if reason is not None:
        return _attend_densely(call, forward, layer)
    rows, options = call.new - forward.candidates, call.logit_options
    if isinstance(layer, StaticPrefillLayer):
        assert forward.position is not None
        given = forward.position, forward.recall, number, forward.settings
        out = layer.attend(call.query[:, :, :rows], *given, options).transpose(1, 2)
        if rows < call.new:
            mask = _mask_of(call, layer)[:, :, rows:]
            last = replace(call, query=call.query[:, :, rows:], mask=mask)
            out = torch.cat([out, _attend_densely(last, forward, layer)[0]], dim=1)
        return out.contiguous(), None
    query, key, value = in_autocast_dtype(call.query, call.key, call.value)
    if not forward.is_sparse(number):
        out = ops.dense_attention(query, key, value, *options)
    elif layer is None:
        state = (None, None, *forward.recall, 0, number, forward.settings)
        out, *_ = ops.prefill_attention(query, key, value, *state, *options)
    else:
        told = forward.candidates, forward.recall, number, forward.settings
        out = layer.attend_in_graph(query[:, :, :rows], *told, options)
        out = with_candidates(out, query, key, value, options)
    return out.transpose(1, 2).contiguous(), None


def _why_dense(call: Call, forward: GraphCall, layer: Layer) -> str | None:
    """Return why a call is dense at any length; None if it may be sparse."""
    reason = dense_reason(call, LAYER_RULES)
    if reason is not None:
        return reason
    plain = forward.plain if call.mask is None else bool(getattr(call.mask, _PLAIN, False))
    if not plain:
        # The mask of one row of a static cache is not marked: decoding is dense.
        return "" if call.new == 1 else MASKED
    if layer is None:
        if forward.cached:
            return "the layers of this cache keep no state of sparse prefill"
        return None if call.new == call.key.shape[2] else MASKED
    return None if layer.values is call.value else OTHER_VALUES


def _hides_keys(mask: Tensor, length: int | Tensor) -> Tensor:
    """Return whether a mask [B, T], perhaps made by the model, hides one of the first keys."""
    seen = torch.arange(mask.shape[1], device=mask.device) < length
    return (seen & ~mask.bool()).any()


def _mask_of(call: Call, layer: Layer, window: int | None = None) -> Tensor:
    """Return the mask of a call, made if it was left out: plain causal, or of a window."""
    if call.mask is not None:
        return call.mask
    past: Any = call.key.shape[2] - call.new
    if isinstance(layer, StaticPrefillLayer):
        past = layer.cumulative_length - call.new
    mask = sdpa_mask(
        call.query.shape[0],
        call.new,
        call.key.shape[2],
        past,
        mask_function=causal_mask_function if window is None else sliding_mask(window),
        allow_is_causal_skip=False,
        device=call.query.device,
    )
    assert mask is not None
    return mask


def _window_hidden(call: Call, forward: GraphCall) -> int | None:
    """Return the window that the mask of a call is known to be of, or that is left of it."""
    window = window_of(call.module)
    if layer_type(call.module) not in ("sliding_attention", "hybrid_sliding"):
        return None
    if call.mask is None:
        return window if window in forward.windows else None
    return window if getattr(call.mask, _WINDOW, None) == window else None


def _attend_densely(call: Call, forward: GraphCall, layer: Layer) -> Attended:
    """Attend as the model did before; an implementation that has its own masks becomes sdpa."""
    window = _window_hidden(call, forward)
    # One row sees every key of its window: PyTorch's attention needs no packed ones.
    if window is not None and call.new > 1 and suits_our_operators(call):
        out, _ = ops.sliding_window_attention(
            call.query, call.key, call.value, window, *call.logit_options
        )
        return out.transpose(1, 2), None
    mask = _mask_of(call, layer, window)
    if forward.previous == "eager" or call.given(*EAGER_ONLY):
        function, mask = eager_function(call.module), as_additive(mask, call.query.dtype)
    else:
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return call_function(function, call, call.key, call.value, mask)
