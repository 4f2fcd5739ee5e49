"""The attention function named `h2o_prefill`: sparse where allowed, else dense.

Dense attention is the function that the model had before, with the mask that it takes. On CPU,
plain causal calls that would go to transformers' sdpa function go to `ops.dense_attention` instead.
It gives the same but for rounding, and is faster for one row of grouped heads, which PyTorch
copies, in 16-bit, where it has no fast path for one row or for float16, and with many rows. Layers
with a sliding window, whatever their function, go to an operator that visits no key outside of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function as sliding_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_prefill import ops
from h2o_prefill.functional import LayerOptions
from h2o_prefill.hf.call import Attended, Call, dense_reason
from h2o_prefill.hf.forward import GRAPH_BREAK, call_in_graph
from h2o_prefill.hf.kinds import LeftOutMask
from h2o_prefill.hf.layer import StaticPrefillLayer
from h2o_prefill.state import LayerState

# What transformers' sdpa function drops or refuses; the model's own eager function honours it.
EAGER_ONLY = ("s_aux", "softcap")


def h2o_prefill_attention(*args: Any, **kwargs: Any) -> Attended:
    """Attend; takes the arguments of `Call`, as transformers passes them."""
    if call_in_graph() is not None:
        call = Call(*args, **kwargs)
        # No mask may mean anything, if it was not our mask function that made none.
        if call.mask is not None or call.left_out is not None:
            return _attend(call)
    return _attend_outside_of_graphs(*args, **kwargs)


# What is not settled before the forward needs its context, which dynamo cannot trace: a compiled
# model breaks its graph here.
@torch.compiler.disable(reason=GRAPH_BREAK)
def _attend_outside_of_graphs(*args: Any, **kwargs: Any) -> Attended:
    return _attend(Call(*args, **kwargs))


def _attend(call: Call) -> Attended:
    """Attend sparsely where nothing forbids it."""
    reason = dense_reason(call)
    call.count(reason)
    if reason is not None:
        return attend_densely(call)
    query, key, value = in_autocast_dtype(call.query, *call.used)
    rows = call.prompt_rows
    out = _attend_sparsely(call, query[:, :, :rows], key, value)
    if rows == call.new:
        return out.transpose(1, 2).contiguous(), None
    # Rows that verify candidates attend as decoded tokens, without a trace.
    last = ops.dense_attention(query[:, :, rows:], key, value, *call.logit_options)
    return torch.cat([out, last], dim=2).transpose(1, 2), None


def _attend_sparsely(call: Call, prompt: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it."""
    layer, context, logits = call.cache_layer, call.context, call.logit_options
    if call.has_state and isinstance(layer, StaticPrefillLayer):
        settled = call.graph if context is None else context.call
        assert settled is not None
        options = LayerOptions(settled.recall, call.number, settled.settings, logits)
        out = layer.attend(prompt, settled.position, options)
        if call.graph is None:
            call.enabled.note_errors(call.layer, layer.errors)
        return out
    assert context is not None  # Else it is dense.
    total = call.past + prompt.shape[2]
    recall = context.recall_lists(len(prompt), call.past, call.new, prompt.device)
    options = LayerOptions(recall, call.number, call.config.to_string(), logits)
    context.was_sparse = True
    state = layer.synchronized() if call.has_state else LayerState()
    if call.has_state and key is layer.keys and value is layer.values:
        out = state.attend(prompt, *options.arguments, total)
    else:
        # There is no cache, or it holds something else, such as latents.
        history = key[:, :, :total], value[:, :, :total]
        out = state.attend_history(prompt, *history, *options.arguments)
    call.enabled.note_errors(call.layer, state.errors)
    return out


def attend_densely(call: Call) -> Attended:
    """Attend to every key that the mask shows, as the model would without this library."""
    if call.graph is not None:
        return _attend_in_graph(call)
    left_out = call.left_out
    if left_out is not None and not left_out.is_plain and suits_our_operators(call):
        return _attend_as(left_out, call), None
    name = _implementation(call)
    function = eager_function(call.module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    # Without a mask sdpa's function lets one query see every key, and is causal from the first key
    # on for more; after a history that means something else, unless we have left out the mask.
    plain = call.mask is None and (call.new == 1 or call.past == 0)
    ours = function is sdpa_attention_forward
    if left_out is not None:
        plain, ours = left_out.is_plain, ours or call.config.exact
    if plain and ours and suits_our_operators(call):
        query, key, value = in_autocast_dtype(call.query, *call.used)
        return ops.dense_attention(query, key, value, *call.logit_options).transpose(1, 2), None
    return call_function(function, call, *call.used, _mask(call, name))


def call_function(
    function: Callable[..., Any], call: Call, key: Tensor, value: Tensor, mask: Any
) -> Attended:
    options = {"dropout": call.dropout, "scaling": call.scaling, **call.kwargs}
    bias = options.get("position_bias")
    if isinstance(bias, Tensor) and bias.shape[-1] == call.key.shape[2]:
        options["position_bias"] = bias[..., : key.shape[2]]  # without unused slots, as the keys
    return function(call.module, call.query, key, value, mask, **options)


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """Return the `eager_attention_forward` of the file that defines an attention class."""
    for base in type(module).__mro__:
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no eager_attention_forward to fall back to")


def _implementation(call: Call) -> str:
    name = call.form.previous
    if name not in ("sdpa", "eager") and isinstance(call.mask, Tensor) and call.mask.ndim == 4:
        # A mask made outside of the forward has sdpa's format, which no other implementation takes.
        name = "sdpa"
    return "eager" if name == "sdpa" and call.has(*EAGER_ONLY) else name


def _attend_as(mask: LeftOutMask, call: Call) -> Tensor:
    """Attend as a mask that was left out says: of a window, of a padded batch, or of both."""
    size, options = mask.window or 0, call.logit_options

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if size and query.shape[2] > 1 and size < key.shape[2]:
            out, _ = ops.sliding_window_attention(query, key, value, size, *options)
        else:
            # All rows see the same first key: plain causal attention, which may be PyTorch's.
            key, value = key[:, :, -size:], value[:, :, -size:]
            out = ops.dense_attention(query, key, value, *options)
        return out.transpose(1, 2)

    tensors = in_autocast_dtype(call.query, call.key, call.value)
    if mask.spans is None:
        return attend(*tensors)
    batch, heads, tokens, _ = tensors[0].shape
    out = tensors[0].new_zeros(batch, tokens, heads, call.value.shape[3])
    # The operators take rows of one length, so those that lie in the same place go together.
    for first, end in dict.fromkeys(mask.spans):
        rows = [row for row, span in enumerate(mask.spans) if span == (first, end)]
        index: Any = rows
        if rows[-1] - rows[0] == len(rows) - 1:  # neighbours: a slice copies nothing
            index = slice(rows[0], rows[-1] + 1)
        if first < end:
            out[index, first:end] = attend(*(x[:, :, first:end][index] for x in tensors))
    return out


def suits_our_operators(call: Call) -> bool:
    """Return whether our operators do what a causal call asks for, on CPU, without gradients."""
    return (
        call.query.device.type == "cpu"
        and call.is_causal
        and call.dropout == 0
        and not call.has("position_bias", "cache")
        and not call.wants_weights  # the function warns of that
        and not call.needs_gradients
        # PyTorch broadcasts a batch of one.
        and call.query.shape[0] == call.key.shape[0]
    )


def _mask(call: Call, name: str) -> Any:
    """Return the mask that an implementation takes, made if it was left out."""
    mask, left_out, device = call.mask, call.left_out, call.query.device

    def make() -> Any:
        assert left_out is not None
        made = left_out.make(
            q_length=call.new,
            q_offset=left_out.end - call.new,
            kv_length=left_out.tokens,
            allow_is_causal_skip=name != "eager",  # That takes none for no mask at all.
        )
        return made.to(device) if hasattr(made, "to") else made

    shared = (lambda _, make: make()) if call.context is None else call.context.shared
    if left_out is not None:
        mask = shared((left_out, call.new, name, device), make)
    if name == "eager" and isinstance(mask, Tensor):
        dtype = call.query.dtype
        # The mask itself is in the value, so that its id cannot be taken by another.
        return shared((id(mask), dtype), lambda: (mask, as_additive(mask, dtype)))[1]
    return mask


def as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the logits; one that is already added stays as it is."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _attend_in_graph(call: Call) -> Attended:
    """Attend as the model did before; an implementation that has its own masks becomes sdpa."""
    assert call.graph is not None
    # A window is known only of a mask that could be left out.
    window, mask = None if call.left_out is None else call.left_out.window, call.mask
    # One row sees every key of its window: PyTorch's attention needs no packed ones.
    if window is not None and call.new > 1 and suits_our_operators(call):
        tensors = call.query, call.key, call.value
        out, _ = ops.sliding_window_attention(*tensors, window, *call.logit_options)
        return out.transpose(1, 2), None
    if mask is None:
        past: Any = call.past
        if isinstance(call.cache_layer, StaticPrefillLayer):
            past = call.cache_layer.cumulative_length - call.new
        mask = sdpa_mask(
            call.query.shape[0],
            call.new,
            call.key.shape[2],
            past,
            mask_function=causal_mask_function if window is None else sliding_mask(window),
            allow_is_causal_skip=False,
            device=call.query.device,
        )
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if call.graph.previous == "eager" or call.has(*EAGER_ONLY):
        function, mask = eager_function(call.module), as_additive(mask, call.query.dtype)
    return call_function(function, call, call.key, call.value, mask)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention: RoPE leaves queries in fp32 and values in 16 bits."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
