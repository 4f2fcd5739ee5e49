"""When an attention call is prefilled sparsely: the decision table."""

from __future__ import annotations

from collections.abc import Callable

import torch

from h2o_prefill.hf.cache import KeepsTokenIds
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.forward import is_traced
from h2o_prefill.hf.layer import StaticPrefillLayer

# Of models that choose keys themselves.
INDEX_ARGUMENTS = ("indices", "block_indices")

# Arguments of attention functions that no operator takes, and why calls with them are dense.
ARGUMENTS = {
    "cache": "paged caches are not supported",
    "position_bias": "position_bias is not supported",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx"),
        "packed sequences are not supported",
    ),
    **dict.fromkeys(INDEX_ARGUMENTS, "the model chooses its own keys already"),
}

TRACED = "the model is being exported or traced, which would keep this call's decisions for all"
EMPTY = "the memory set is empty (K + L + H = 0)"
SHARED_MODULE = "layers share a module, and settings by layer cannot tell them apart"
NOT_ENABLED = "the model is not enabled: h2o_prefill.enable(model) makes its prefill sparse"
TRAINING = "the model is in training mode; call model.eval()"
OTHER_VALUES = "the model attends to other values than it caches, such as halves of them"
REPEATED = "layers that attend several times to the same cached keys are not supported"
STATIC = (
    "static caches that were filled while the model was not enabled, and other classes than "
    "StaticCache, are not supported"
)
PADDED = "attention_mask hides tokens (padding); prefill prompts of different lengths one by one"
NOT_CAUSAL = "the attention mask is not plain causal (packed sequences, or an overlaid mask)"
CUSTOM_MASK = "a custom attention mask is not supported"
MASKED = "a custom attention mask, or padding in a static cache, is not supported"
OWN_MASKS = "the model makes its own masks, so that attention is not known to be causal"
NO_STATE = "the cache keeps no state for layers of this kind"


def needs_gradients(call: Call) -> bool:
    """Return whether a gradient of the result may be asked for."""
    tensors = (call.query, call.key, call.value, call.kwargs.get("s_aux"))
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def wants_weights(call: Call) -> bool:
    """Return whether the user asked for the attention weights, `output_attentions`."""
    wanted = call.kwargs.get("output_attentions")
    return bool(getattr(call.hf_config, "output_attentions", False) if wanted is None else wanted)


def _is_dense_by_settings(call: Call) -> bool:
    config, past, rows = call.config, call.past, call.prompt_rows
    if config.exact:
        if call.layer in config.dense_layers or not config.is_long_call(past, rows):
            return True
    elif not config.is_sparse(-1 if call.layer is None else call.layer, past, rows):
        return True
    # One chunk without history is plain causal attention; only later calls with its cache need
    # scores.
    return past == 0 and rows <= config.chunk_size and call.cache_layer is None


def _settings_reason(call: Call) -> str:
    config = call.config
    if call.new == 1 or config.exact or call.layer in config.dense_layers:
        return ""
    is_empty = config.memory_size == 0 and config.is_long_call(call.past, call.prompt_rows)
    return EMPTY if is_empty else ""


def _argument_reason(call: Call) -> str:
    return next((why for name, why in ARGUMENTS.items() if call.has(name)), "")


def _is_in_window(call: Call) -> bool:
    window, mask = call.form.window, call.left_out
    size = call.kwargs.get("sliding_window")
    if size is not None and size < call.key.shape[2]:
        return True
    return window is not None and (mask is None or mask.window != window or mask.in_window)


def _window_reason(call: Call) -> str:
    """Return why a windowed layer is dense: by design, unless no layer of the model is sparse."""
    context = call.context
    if context is None or not context.enabled.only_windows:
        return ""
    if call.left_out is not None and call.left_out.window == call.form.window:
        return "every layer has a sliding window, or chunks, that the prompt does not fit into"
    if getattr(context.layer_of(call.module), "is_compileable", False):
        return "sliding or chunked layers of static caches are not supported"
    return OWN_MASKS if call.mask is None else context.mask_reason or CUSTOM_MASK


def _changes_values(call: Call) -> bool:
    layer = call.cache_layer
    return layer is not None and layer.keys is call.key and layer.values is not call.value


def _is_repeated(call: Call) -> bool:
    layer = call.cache_layer
    if isinstance(layer, StaticPrefillLayer):
        return not layer.updated
    return layer is not None and layer.state.scored > call.past


def _is_static_elsewhere(call: Call) -> bool:
    assert call.context is not None
    layer = call.context.layer_of(call.module)
    if isinstance(layer, StaticPrefillLayer):
        return call.context.call is None  # A cache that only a part of the model was given.
    return bool(getattr(layer, "is_compileable", False))


def _mask_reason(call: Call) -> str:
    """Return why the mask of a call is not plain causal."""
    if call.mask is not None:
        return (call.context.mask_reason if call.context else None) or CUSTOM_MASK
    return OWN_MASKS if call.left_out is None or call.left_out.is_plain else PADDED


def _history_reason(call: Call) -> str:
    if call.form.window is not None:
        return "a long call goes on in sliding or chunked layers, which keep no state between calls"
    if isinstance(getattr(call.context, "cache", None), KeepsTokenIds):
        return NO_STATE
    return "a long call goes on from a cache that was not filled by this model while it was enabled"


# The decision table: the first that applies gives the reason. It is empty for calls that are dense
# by design, which are not reported.
Rule = tuple[Callable[[Call], bool], str | Callable[[Call], str]]

# Asked first, but not in compiled graphs: there the operator asks, of every call.
SETTINGS: tuple[Rule, ...] = (
    (lambda call: is_traced(), TRACED),
    (_is_dense_by_settings, _settings_reason),
)
# Whatever the cache and the mask are.
CALLS: tuple[Rule, ...] = (
    (lambda call: not call.is_causal, ""),
    (lambda call: call.form.reason is not None, lambda call: call.form.reason or ""),
    (_is_in_window, _window_reason),
    (lambda call: call.layer is None and bool(call.config.dense_layers), SHARED_MODULE),
    (lambda call: call.module.training, TRAINING),
    (needs_gradients, "gradients are on; run under torch.no_grad() or torch.inference_mode()"),
    (lambda call: call.dropout > 0, "attention dropout is not supported"),
    (wants_weights, "output_attentions is not supported"),
    (lambda call: call.has(*ARGUMENTS), _argument_reason),
    (_changes_values, OTHER_VALUES),
)
EAGER: tuple[Rule, ...] = (
    (lambda call: call.context is None, NOT_ENABLED),
    (_is_repeated, REPEATED),
    (_is_static_elsewhere, STATIC),
    (lambda call: not call.is_plain, _mask_reason),
    (lambda call: call.past > 0 and call.cache_layer is None, _history_reason),
)
GRAPH: tuple[Rule, ...] = (
    # The mask of one row of a static cache is not marked: decoding is dense.
    (lambda call: not call.is_plain and call.new == 1, ""),
    (lambda call: not call.is_plain, MASKED),
    (lambda call: call.cache_layer is None, NO_STATE),
)


def dense_reason(call: Call) -> str | None:
    """Return why a call is dense: None if it is sparse, empty if it is dense by design."""
    for applies, reason in CALLS + GRAPH if call.graph is not None else SETTINGS + CALLS + EAGER:
        if applies(call):
            return reason(call) if callable(reason) else reason
    return None
