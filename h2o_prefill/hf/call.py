"""One call of the attention function, and its properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import LogitOptions
from h2o_prefill.hf.cache import StaticPrefillLayer
from h2o_prefill.hf.forward import (
    DEFAULT_STATE,
    EnabledState,
    ForwardContext,
    GraphCall,
    call_in_graph,
    current_context,
)
from h2o_prefill.hf.kinds import Padding, Window, is_causal, window_of, windows_ahead
from h2o_prefill.hf.layer import ChunkedPrefillLayer, graph

Layer = ChunkedPrefillLayer | StaticPrefillLayer | None

# What attention functions return: output [B, Tq, Hq, Dv], and the weights where they are made.
Attended = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
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
    config: PrefillConfig
    # The forward that this call belongs to; None if the model was never enabled, and in a graph.
    context: ForwardContext | None
    # In a compiled graph, what it was told, and the layer of the cache that was updated last.
    graph: GraphCall | None
    updated: Layer
    # The layer of one of our caches, if the caller passed one and it holds the keys.
    cache_layer: Layer
    total: int  # tokens up to the last of this call; a static cache has unused slots after them
    window: Window | None = None  # what the layer's window hides, if its mask was left out
    # Where the rows lie, if the mask of a padded batch was left out.
    padding: Padding | None = None

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
        given = (module, query, key, value, attention_mask, dropout, scaling, kwargs)
        length = key.shape[2]
        told = call_in_graph()
        if told is not None:
            updated, graph.layer = graph.layer, None
            held = updated if updated is not None and updated.keys is key else None
            return cls(*given, told.config, None, told, updated, held, length)
        context = current_context(getattr(module, "config", None))
        window = padding = None
        if attention_mask is None:
            window = _window_of_call(module, context, query.shape[2], length)
            padding = _padding_of_call(module, context, query, key)
            if context is not None and is_causal(module, kwargs):
                length = context.filled.get(length, length)
        layer = None if context is None else _cache_layer(module, context, key)
        config = (DEFAULT_STATE if context is None else context).config
        return cls(*given, config, context, None, None, layer, length, window, padding)

    @property
    def hf_config(self) -> Any:
        return getattr(self.module, "config", None)

    @property
    def number(self) -> int:
        """The layer as operators take it. Where it is unknown, errors alone depend on it: not 0."""
        return 1 if self.layer is None else self.layer

    @property
    def is_causal(self) -> bool:
        return is_causal(self.module, self.kwargs)

    @property
    def enabled(self) -> EnabledState:
        """What the model runs with; the defaults if it was never enabled."""
        return DEFAULT_STATE if self.context is None else self.context.enabled

    @property
    def new(self) -> int:
        """Tokens of this call, Tq."""
        return self.query.shape[2]

    @property
    def past(self) -> int:
        """Tokens before this call."""
        return self.total - self.new

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Key and value without unused slots."""
        if self.total == self.key.shape[2]:
            return self.key, self.value
        return self.key[:, :, : self.total], self.value[:, :, : self.total]

    @property
    def prompt_rows(self) -> int:
        """Tokens of this call before those that assisted decoding verifies, always densely."""
        if self.graph is not None:
            return self.new - self.graph.candidates
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

    def given(self, *names: str) -> bool:
        return any(self.kwargs.get(name) is not None for name in names)


def as_attention_function(attend: Callable[[Call], Attended]) -> Callable[..., Attended]:
    """Turn a function of a `Call` into an attention function of transformers."""

    return lambda *args, **kwargs: attend(Call.of(*args, **kwargs))


def _cache_layer(module: nn.Module, context: ForwardContext, key: Tensor) -> Layer:
    """Return the layer of the caller's cache that holds the keys of a call, if it is ours."""
    layer = context.layer_of(module)
    if getattr(layer, "keys", None) is not key:
        # Recurrent models have several cache layers for one module.
        layers = getattr(context.cache, "layers", None) or ()
        layer = next((one for one in layers if getattr(one, "keys", None) is key), layer)
    if isinstance(layer, StaticPrefillLayer):
        return layer if layer.keys is key else None
    # Multi-head latent attention caches latents, one for each key.
    ours = isinstance(layer, ChunkedPrefillLayer) and layer.get_seq_length() == key.shape[2]
    return layer if ours else None


def _window_of_call(
    module: nn.Module, context: ForwardContext | None, queries: int, keys: int
) -> Window | None:
    """Return what the layer's window hides, of a call whose mask was left out."""
    windows = windows_ahead.get() if context is None else context.windows
    window = windows.get(window_of(module) or 0) if windows else None
    fits = window is not None and window.keys == keys and window.queries >= queries
    return window if fits else None


def _padding_of_call(
    module: nn.Module, context: ForwardContext | None, query: Tensor, key: Tensor
) -> Padding | None:
    """Return the padding of the rows of a call whose mask was left out."""
    padding = None if context is None else context.paddings.get(query.shape[2])
    if padding is None or key.shape[2] != query.shape[2] or len(query) != len(padding.spans):
        return None
    # Attention to something else in the same forward, as an encoder, may be of the same size.
    return padding if is_causal(module, {}) else None
