"""One call of the attention function, and its properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import LogitOptions
from h2o_prefill.hf.forward import (
    DEFAULT_STATE,
    EnabledState,
    ForwardContext,
    StaticCall,
    call_in_graph,
    current_context,
)
from h2o_prefill.hf.kinds import LayerForm, LeftOutMask, form_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer, StaticPrefillLayer, graph

Layer = ChunkedPrefillLayer | StaticPrefillLayer | None

# What attention functions return: output [B, Tq, Hq, Dv], and the weights where they are made.
Attended = tuple[Tensor, Tensor | None]

# The attribute of the masks of compiled graphs that could be left out: (window,).
LEFT_OUT = "_h2o_prefill_left_out"

GRAPH_BREAK = (
    "an enabled model is one graph with a StaticCache alone; compile the model, or its forward "
    "before it is enabled"
)


@dataclass(eq=False)
class Call:
    """One call of the attention function."""

    module: nn.Module
    query: Tensor  # [B, Hq, Tq, D]
    key: Tensor  # [B, Hkv, Tkv, D]
    value: Tensor  # [B, Hkv, Tkv, Dv]
    mask: Any
    dropout: float
    scaling: float | None  # the softmax scale; None: D ** -0.5
    kwargs: dict[str, Any]
    form: LayerForm
    # The forward that this call belongs to; None if the model was never enabled, and in a graph.
    context: ForwardContext | None = None
    graph: StaticCall | None = None  # in a compiled graph, what was settled before
    # The layer of one of our caches, if the caller passed one and it holds the keys.
    cache_layer: Layer = None
    left_out: LeftOutMask | None = None  # what the mask says, if our mask function knows
    updated: Layer = None  # in a compiled graph, the layer of the cache that was updated last

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Call:
        """Return a call from the arguments that transformers passes to attention functions."""
        arguments = module, query, key, value, attention_mask, dropout, scaling, kwargs
        settled = call_in_graph()
        if settled is not None:
            form = form_of(module)
            layer, graph.layer = graph.layer, None
            call = cls(*arguments, form, None, settled, layer if _holds(layer, key) else None)
            call.updated = layer
            call.left_out = _left_out_in_graph(call)
            return call
        context = current_context(getattr(module, "config", None))
        if context is None:
            return cls(*arguments, form_of(module))
        call = cls(*arguments, context.enabled.form_of(module), context)
        call.cache_layer = _cache_layer(module, context, key)
        if attention_mask is None and call.is_causal:
            call.left_out = context.left_out(call.form.window, query, key.shape[2])
        return call

    @property
    def hf_config(self) -> Any:
        return getattr(self.module, "config", None)

    @property
    def config(self) -> PrefillConfig:
        """The settings of the prompt."""
        settled = self.graph or self.context or DEFAULT_STATE
        return settled.config

    @property
    def number(self) -> int:
        """The layer as operators take it. Where it is unknown, errors alone depend on it: not 0."""
        return 1 if self.layer is None else self.layer

    @property
    def is_causal(self) -> bool:
        causal = self.kwargs.get("is_causal")
        return not self.form.is_cross and bool(self.form.is_causal if causal is None else causal)

    @property
    def is_plain(self) -> bool:
        """Whether every query is known to see all tokens up to its own."""
        left_out = self.left_out
        return left_out is not None and left_out.is_plain and left_out.queries == self.new

    @property
    def enabled(self) -> EnabledState:
        """What the model runs with; the defaults if it was never enabled."""
        return DEFAULT_STATE if self.context is None else self.context.enabled

    @property
    def new(self) -> int:
        """Tokens of this call, Tq."""
        return self.query.shape[2]

    @property
    def total(self) -> int:
        """Keys up to the last token of this call; unused slots of a static cache follow."""
        return self.key.shape[2] if self.left_out is None else self.left_out.tokens

    @property
    def past(self) -> int:
        """Tokens before this call."""
        return self.total - self.new

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
    def layer(self) -> int | None:
        """The number of the layer. None if it has none: Zamba's share a module, numbered -1."""
        index = getattr(self.module, "layer_idx", None)
        return index if isinstance(index, int) and index >= 0 else None

    @property
    def logit_options(self) -> LogitOptions:
        """How the operators make logits; sinks [Hq] are one more for each query head's softmax."""
        return self.scaling, self.kwargs.get("s_aux"), self.kwargs.get("softcap") or 0.0

    def count(self, reason: str | None) -> None:
        """Count the call of its layer, None: sparse; warn of a reason that is not by design."""
        if self.graph is not None:  # counted after the forward
            self.graph.outcomes.append((self.number, reason))
            return
        if self.context is not None:
            rows, exact = self.query.shape[0] * self.new, self.config.exact
            layer = getattr(self.module, "layer_idx", None)
            self.enabled.count(layer, rows, "" if exact else reason)
        if reason and not self.config.exact:
            self.enabled.report(f"dense attention: {reason}")

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        return make() if self.context is None else self.context.shared(key, make)

    def has(self, *names: str) -> bool:
        return any(self.kwargs.get(name) is not None for name in names)


def as_attention_function(attend: Callable[[Call], Attended]) -> Callable[..., Attended]:
    """Turn a function of a `Call` into an attention function of transformers."""

    return lambda *args, **kwargs: attend(Call.of(*args, **kwargs))


def _holds(layer: Any, key: Tensor) -> bool:
    return getattr(layer, "keys", None) is key


def _left_out_in_graph(call: Call) -> LeftOutMask | None:
    """Return what the mask of a call in a compiled graph says, if it could be left out."""
    assert call.graph is not None
    window, keys = call.form.window, call.key.shape[2]
    if call.mask is None:
        known = window in call.graph.left_out
    else:
        known = getattr(call.mask, LEFT_OUT, None) == (window,)
    if not known:
        return None
    return LeftOutMask(window, call.new, keys, 0, keys, None, lambda: None)


def _cache_layer(module: nn.Module, context: ForwardContext, key: Tensor) -> Layer:
    """Return the layer of the caller's cache that holds the keys of a call, if it is ours."""
    layer = context.layer_of(module)
    if not _holds(layer, key):
        # Recurrent models have several cache layers for one module.
        layers = getattr(context.cache, "layers", None) or ()
        layer = next((one for one in layers if _holds(one, key)), layer)
    if isinstance(layer, StaticPrefillLayer):
        return layer if _holds(layer, key) else None
    # Multi-head latent attention caches latents, one for each key.
    holds = isinstance(layer, ChunkedPrefillLayer) and layer.get_seq_length() == key.shape[2]
    return layer if holds else None
