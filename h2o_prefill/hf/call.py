"""One call of the attention function, and why it is dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.hf.forward import MASK, call_in_graph, current_context
from h2o_prefill.hf.kinds import (
    DEFAULT_STATE,
    NO_INDEX,
    UNSUPPORTED,
    LayerForm,
    LeftOutMask,
    enabled_of,
    form_of,
)
from h2o_prefill.hf.layer import StaticPrefillLayer, running

# What attention functions return: output [B, Tq, Hq, Dv], and the weights where they are made.
Attended = tuple[Tensor, Tensor | None]

# The attribute of the masks of compiled graphs that could be left out: (window,).
LEFT_OUT = "_h2o_prefill_left_out"

TRACED = "the model is being exported or traced, which would keep this call's decisions for all"
NOT_ENABLED = "the model is not enabled: h2o_prefill.enable(model) makes its prefill sparse"
TRAINING = (
    "the model trains (training mode, gradients or dropout); call model.eval() and run under "
    "torch.no_grad()"
)
WEIGHTS = "output_attentions is not supported"
WINDOWS = "every layer has a sliding window, or chunks, that the prompt does not fit into"
NO_STATE = (
    "the cache keeps no state (it has sliding or chunked layers, is of another class, or was not "
    "filled by this model while it was enabled)"
)

# Arguments of attention functions that no operator takes, and why calls with them are dense.
ARGUMENTS = {
    "cache": NO_STATE,  # a paged one
    "position_bias": UNSUPPORTED,
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx"), MASK),
}


class Call:
    """One call of the attention function, made of the arguments that transformers passes to it."""

    def __init__(
        self,
        module: nn.Module,
        query: Tensor,  # [B, Hq, Tq, D]
        key: Tensor,  # [B, Hkv, Tkv, D]
        value: Tensor,  # [B, Hkv, Tkv, Dv]
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,  # the softmax scale; None: D ** -0.5
        **kwargs: Any,
    ) -> None:
        self.module, self.query, self.key, self.value = module, query, key, value
        self.mask, self.dropout = attention_mask, dropout
        self.scaling, self.kwargs = scaling, kwargs
        # How the operators make logits; sinks [Hq] are one more for each query head's softmax.
        self.logit_options = scaling, kwargs.get("s_aux"), kwargs.get("softcap") or 0.0
        # In a compiled graph, what was settled before the forward; else the forward, None if the
        # model was not enabled when it began.
        self.graph, self.context, enabled = call_in_graph(), None, None
        if self.graph is None:
            config = getattr(module, "config", None)
            self.context = current_context(config)
            enabled = enabled_of(config) if self.context is None else self.context.enabled
        self.form: LayerForm = form_of(module) if enabled is None else enabled.form_of(module)
        self.enabled = DEFAULT_STATE if self.context is None else self.context.enabled
        self.config = (self.graph or self.context or DEFAULT_STATE).config
        # The number of the layer, None if it has none; and as operators take it: where it is
        # unknown, errors alone depend on it, which are not measured in layer 0.
        index = self.form.layer_idx
        self.layer = index if index is not None and index >= 0 else None
        self.number = 1 if self.layer is None else self.layer
        causal = kwargs.get("is_causal")
        causal = self.form.is_causal if causal is None else causal
        self.is_causal = bool(causal) and not self.form.is_cross
        # The layer of the caller's cache, in a compiled graph the one that was updated last; and
        # whether it is ours, with the keys of the call.
        self.cache_layer: Any = None
        self.has_state = False
        self.left_out: LeftOutMask | None = None  # what the mask says, if our mask function knows
        window, keys, self.new = self.form.window, key.shape[2], query.shape[2]
        if self.graph is not None:
            self.cache_layer, running.layer = running.layer, None
            self.has_state = self.cache_layer is not None and self.cache_layer.keys is key
            known = getattr(attention_mask, LEFT_OUT, None) == (window,)
            if attention_mask is None:
                known = window in self.graph.left_out
            if known:
                self.left_out = LeftOutMask(window, self.new, keys, 0, keys, None, lambda: None)
        elif self.context is not None:
            self.cache_layer, self.has_state = self.context.layer_for(module, key)
            if attention_mask is None and self.is_causal:
                self.left_out = self.context.left_out(window, query, keys)
        # Keys up to the last token of this call; unused slots of a static cache follow.
        self.total = keys if self.left_out is None else self.left_out.tokens
        self.past = self.total - self.new  # tokens before this call

    @property
    def used(self) -> tuple[Tensor, Tensor]:
        """Key and value without unused slots."""
        if self.total == self.key.shape[2]:
            return self.key, self.value
        return self.key[:, :, : self.total], self.value[:, :, : self.total]

    @property
    def prompt_rows(self) -> int:
        """Tokens of this call before those that assisted decoding verifies, always densely."""
        verified = 0 if self.context is None else self.context.candidates_in(self.past, self.new)
        return self.new - verified

    @property
    def needs_gradients(self) -> bool:
        """Whether a gradient of the result may be asked for."""
        tensors = (self.query, self.key, self.value, self.kwargs.get("s_aux"))
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def wants_weights(self) -> bool:
        """Whether the user asked for the attention weights, `output_attentions`."""
        name, config = "output_attentions", getattr(self.module, "config", None)
        if self.has(name):
            return bool(self.kwargs[name])
        read = lambda: bool(getattr(config, name, False))  # noqa: E731
        # Configs take long to read.
        return read() if self.context is None else self.context.shared((name, id(config)), read)

    def has(self, *names: str) -> bool:
        return any(self.kwargs.get(name) is not None for name in names)

    def count(self, reason: str | None) -> None:
        """Count the call of its layer, None: sparse; warn of a reason that is not by design."""
        if self.graph is not None:  # counted after the forward
            self.graph.outcomes.append((self.number, reason))
            return
        self.enabled.count(self.form.layer_idx, self.query.shape[0] * self.new, reason)


def dense_reason(call: Call) -> str | None:
    """Return why a call is dense: None if it is sparse, empty if it is dense by design."""
    context, form, config = call.context, call.form, call.config
    if context is not None and context.is_traced and not config.exact:
        return TRACED
    # In a graph the operator reads the settings, in every call.
    if call.graph is None and _is_dense_by_settings(call):
        return ""
    if not call.is_causal:
        return ""
    if form.reason is not None:
        return form.reason
    if _is_in_window(call):
        return _window_reason(call)
    if call.layer is None and config.dense_layers:
        return NO_INDEX
    if call.module.training or call.dropout > 0 or call.needs_gradients:
        return TRAINING
    if call.wants_weights:
        return WEIGHTS
    if names := [name for name in ARGUMENTS if call.has(name)]:
        return ARGUMENTS[names[0]]
    if call.graph is None and context is None:
        return NOT_ENABLED
    if call.has_state and _differs_from_cache(call):
        return UNSUPPORTED
    if context is not None and not call.has_state and _is_static(call):
        return NO_STATE
    left_out = call.left_out
    if left_out is None or not left_out.is_plain or left_out.queries != call.new:
        if call.graph is not None and call.new == 1:
            return ""  # The mask of one row of a static cache is not marked.
        return MASK if context is None else context.mask_reason
    return NO_STATE if not call.has_state and (context is None or call.past > 0) else None


def _is_dense_by_settings(call: Call) -> bool:
    config, past, rows = call.config, call.past, call.prompt_rows
    if call.new == 1 and past > 0:
        return True
    sparse = config.is_sparse(-1 if call.layer is None else call.layer, past, rows)
    # One chunk without history is plain causal attention; only later calls with its cache need
    # scores.
    return not sparse or (past == 0 and rows <= config.chunk_size and not call.has_state)


def _is_in_window(call: Call) -> bool:
    window, mask = call.form.window, call.left_out
    size = call.kwargs.get("sliding_window")
    if size is not None and size < call.key.shape[2]:
        return True
    return window is not None and (mask is None or mask.window != window or mask.in_window)


def _window_reason(call: Call) -> str:
    """Return why a windowed layer is dense: by design, unless no layer of the model is sparse."""
    if call.context is None or not call.enabled.only_windows:
        return ""
    if call.left_out is not None and call.left_out.window == call.form.window:
        return WINDOWS
    return NO_STATE if _is_static(call) else call.context.mask_reason


def _is_static(call: Call) -> bool:
    """Return whether a layer of a static cache is not ours, or not of the outermost model's."""
    if isinstance(call.cache_layer, StaticPrefillLayer):
        return call.context is None or call.context.call is None
    return bool(getattr(call.cache_layer, "is_compileable", False))


def _differs_from_cache(call: Call) -> bool:
    """Return whether a layer attends to other values than it caches, or several times to them."""
    layer = call.cache_layer
    if layer.keys is call.key and layer.values is not call.value:
        return True
    if isinstance(layer, StaticPrefillLayer):
        return not layer.updated
    return bool(layer.state.scored > call.past)
