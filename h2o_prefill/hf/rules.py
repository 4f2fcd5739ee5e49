"""When an attention call is prefilled sparsely: the decision table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from h2o_prefill.hf.cache import KeepsTokenIds, StaticPrefillLayer
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.forward import is_traced
from h2o_prefill.hf.kinds import WINDOWED, layer_type, window_of

# The attribute of masks that are plain causal. A graph that needs no mask does not compute it.
PLAIN = "_h2o_prefill_plain"

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
INDEX_ARGUMENTS = ("indices", "block_indices")

STATIC = (
    "static caches that were filled while the model was not enabled, and other classes than "
    "StaticCache, are not supported"
)
OWN_MASKS = "the model makes its own masks, so that attention is not known to be causal"
NOT_ENABLED = "the model is not enabled: h2o_prefill.enable(model) makes its prefill sparse"
OTHER_VALUES = "the model attends to other values than it caches, such as halves of them"
TRACED = "the model is being exported or traced, which would keep this call's decisions for all"
MASKED = "a custom attention mask, or padding in a static cache, is not supported"
NO_STATE = "the cache keeps no state for layers of this kind"
PADDED = "attention_mask hides tokens (padding); prefill prompts of different lengths one by one"


# Where a rule holds: everywhere; outside of compiled graphs; in them, whose other conditions are
# settled before the forward.
ANYWHERE, EAGER, GRAPH = "anywhere", "eager", "graph"


class Rule(NamedTuple):
    """A reason for dense attention."""

    applies: Callable[[Call], bool]
    # What the user reads. Empty for calls that are dense by design, which are not reported.
    reason: str | Callable[[Call], str] = ""
    where: str = EAGER


def _is_windowed(call: Call) -> bool:
    """Return whether a layer is of another kind than full attention, and attends otherwise."""
    kind = layer_type(call.module)
    if kind == "full_attention" and not call.given("sliding_window"):
        return False
    if kind not in ("full_attention", *WINDOWED) or call.context is None:
        return True
    given = call.kwargs.get("sliding_window")
    return not call.context.windows_show_all or (given is not None and given < call.key.shape[2])


def _is_short(call: Call) -> bool:
    if not call.config.is_long_call(call.past, call.prompt_rows):
        return True
    # One chunk without history is plain causal attention; only later calls with its cache need
    # scores.
    one_chunk = call.prompt_rows <= call.config.chunk_size
    return call.past == 0 and one_chunk and call.cache_layer is None


def needs_gradients(call: Call) -> bool:
    """Return whether a gradient of the result may be asked for."""
    tensors = (call.query, call.key, call.value, call.kwargs.get("s_aux"))
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def wants_weights(call: Call) -> bool:
    """Return whether the user asked for the attention weights, `output_attentions`."""
    wanted = call.kwargs.get("output_attentions")
    return bool(getattr(call.hf_config, "output_attentions", False) if wanted is None else wanted)


def _changes_values(call: Call) -> bool:
    layer = call.cache_layer
    return layer is not None and layer.keys is call.key and layer.values is not call.value


def _is_repeated(call: Call) -> bool:
    layer = call.cache_layer
    if isinstance(layer, StaticPrefillLayer):
        return layer.added is None
    return layer is not None and layer.state is not None and layer.state.length > call.past


def _shares_keys(call: Call) -> bool:
    if getattr(call.module, "is_kv_shared_layer", False):
        return True
    config = call.hf_config
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    layers = getattr(config, "num_hidden_layers", None) or 0
    return shared > 0 and getattr(call.module, "layer_idx", 0) >= layers - shared


def _is_encoder_decoder(call: Call) -> bool:
    config = call.hf_config
    # A decoder with a config of its own, as T5Gemma's, names the width of the encoder.
    states = getattr(config, "cross_attention_hidden_size", None)
    return bool(getattr(config, "is_encoder_decoder", False)) or states is not None


def _is_static_elsewhere(call: Call) -> bool:
    layer = None if call.context is None else call.context.layer_of(call.module)
    if isinstance(layer, StaticPrefillLayer):
        # A cache that only a part of the model was given.
        return call.context is None or call.context.call is None
    return bool(getattr(layer, "is_compileable", False))


def _makes_own_masks(call: Call) -> bool:
    return call.context is not None and (call.new, call.total) not in call.context.plain


def _mask_reason(call: Call) -> str:
    made = None if call.context is None else call.context.mask_reason
    return made or "a custom attention mask is not supported"


def _window_reason(call: Call) -> str:
    """Return why a windowed layer is dense: by design, unless no layer of the model is sparse."""
    context = call.context
    if context is None or not context.enabled.only_windows:
        return ""
    if call.window is None and getattr(context.layer_of(call.module), "is_compileable", False):
        return "sliding or chunked layers of static caches are not supported"
    if context.windows_show_all is None:
        return OWN_MASKS if call.mask is None else _mask_reason(call)
    return "every layer has a sliding window, or chunks, that the prompt does not fit into"


def _history_reason(call: Call) -> str:
    if window_of(call.module) is not None:
        return "a long call goes on in sliding or chunked layers, which keep no state between calls"
    if isinstance(getattr(call.context, "cache", None), KeepsTokenIds):
        return NO_STATE
    return "a long call goes on from a cache that was not filled by this model while it was enabled"


def _is_masked(call: Call) -> bool:
    """Return whether the mask of a call in a graph may hide more than causality does."""
    assert call.graph is not None
    return not (call.graph.plain if call.mask is None else getattr(call.mask, PLAIN, False))


def _anywhere(applies: Callable[[Call], bool], reason: str | Callable[[Call], str] = "") -> Rule:
    return Rule(applies, reason, ANYWHERE)


# The decision table: the first rule that applies gives the reason.
RULES = (
    Rule(lambda call: is_traced(), TRACED),
    Rule(_is_short),
    Rule(lambda call: call.layer in call.config.dense_layers),
    Rule(
        lambda call: (
            not call.config.exact and not call.config.is_sparse_call(call.past, call.prompt_rows)
        ),
        "the memory set is empty (K + L + H = 0)",
    ),
    # These look only at the layer and at what the model passed.
    _anywhere(lambda call: not call.is_causal),
    _anywhere(_is_windowed, _window_reason),
    _anywhere(
        lambda call: not isinstance(getattr(call.module, "layer_idx", None), int),
        "the attention layers do not know their index",
    ),
    _anywhere(
        lambda call: call.layer is None and bool(call.config.dense_layers),
        "layers share a module, and settings by layer cannot tell them apart",
    ),
    _anywhere(_is_encoder_decoder, "encoder-decoder models are not supported"),
    _anywhere(
        lambda call: call.module.training, "the model is in training mode; call model.eval()"
    ),
    _anywhere(
        needs_gradients, "gradients are on; run under torch.no_grad() or torch.inference_mode()"
    ),
    _anywhere(lambda call: call.dropout > 0, "attention dropout is not supported"),
    _anywhere(wants_weights, "output_attentions is not supported"),
    _anywhere(lambda call: call.given("cache"), "paged caches are not supported"),
    _anywhere(_shares_keys, "layers that share the keys of another layer are not supported"),
    _anywhere(lambda call: call.given("position_bias"), "position_bias is not supported"),
    _anywhere(lambda call: call.given(*PACKING_ARGUMENTS), "packed sequences are not supported"),
    _anywhere(lambda call: call.given(*INDEX_ARGUMENTS), "the model chooses its own keys already"),
    # The mask of one row of a static cache is not marked: decoding is dense.
    Rule(lambda call: _is_masked(call) and call.new == 1, "", GRAPH),
    Rule(_is_masked, MASKED, GRAPH),
    Rule(
        lambda call: call.cache_layer is None,
        NO_STATE,
        GRAPH,
    ),
    _anywhere(_changes_values, OTHER_VALUES),
    Rule(
        _is_repeated, "layers that attend several times to the same cached keys are not supported"
    ),
    Rule(_is_static_elsewhere, STATIC),
    Rule(lambda call: call.mask is not None, _mask_reason),
    Rule(lambda call: call.padding is not None, PADDED),
    Rule(_makes_own_masks, OWN_MASKS),
    Rule(lambda call: call.past > 0 and call.cache_layer is None, _history_reason),
    Rule(lambda call: call.context is None, NOT_ENABLED),
)


def dense_reason(call: Call) -> str | None:
    """Return why a call is dense: None if it is sparse, empty if it is dense by design."""
    where = EAGER if call.graph is None else GRAPH
    for rule in RULES:
        if rule.where in (where, ANYWHERE) and rule.applies(call):
            return rule.reason(call) if callable(rule.reason) else rule.reason
    return None
