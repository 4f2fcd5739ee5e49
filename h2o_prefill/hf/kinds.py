"""What is known of a model: the kinds of its layers, and the settings that it is enabled with."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.fingerprint import digest
from h2o_prefill.presets import PRESETS

# The name under which transformers finds our attention function and mask function. No "flash",
# "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill"

# The `EnabledState` of each Hugging Face config that is switched over, under the config's id:
# several models may share one config object, and then the switch of one reaches the others.
switched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

NO_INDEX = "the attention layers have no number, by which caches and dense_layers know them"
UNSUPPORTED = (
    "attention of this kind is not supported (encoder-decoders, position_bias, keys that layers "
    "share, other values than the cached ones)"
)

# Kinds of layers that attend as full ones do to a prompt that their window holds.
WINDOWED = ("sliding_attention", "hybrid_sliding", "chunked_attention")


def count_heads(model: Any) -> tuple[int, int]:
    """Return the decoder layers of a model and the most KV heads of a layer; 1 where unknown."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    names = "num_key_value_heads", "num_attention_heads"
    heads = next((x for name in names if (x := getattr(config, name, None))), 1)
    layers = getattr(config, "num_hidden_layers", None) or 1
    if not isinstance(heads, int):  # one number a layer, none for one without attention
        return len(heads), max(number or 0 for number in heads)
    return layers if isinstance(layers, int) else max(layers), heads


def is_cross_attention(module: nn.Module, path: str = "") -> bool:
    """Return whether a layer attends to the keys of something else, such as an image."""
    parts = [type(module).__name__, *path.split(".")]
    return bool(getattr(module, "is_cross_attention", False)) or any(
        "cross" in part.lower() or part in ("encoder_attn", "EncDecAttention") for part in parts
    )


def is_causal(module: nn.Module) -> bool:
    """Return whether module and config say that a layer is causal."""
    config = getattr(module, "config", None)
    says = bool(getattr(module, "is_causal", True)) and bool(getattr(config, "is_causal", True))
    return says and not is_cross_attention(module)


def layer_type(module: nn.Module) -> str:
    """Return the kind of an attention layer, in the words of a config's `layer_types`.

    Llama 4 marks its chunked layers nowhere else; Mistral and Phi 3 have no `layer_types` and one
    window for all layers.
    """
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if types is not None and isinstance(index, int) and 0 <= index < len(types):
        kind = str(types[index])
        if kind == "hybrid":  # Attention of the usual kind, beside a recurrence.
            kind = "full_attention"
    elif getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    # Exaone 4 gives its window to every layer, and a flag.
    windowed = getattr(module, "is_sliding", True) and getattr(module, "sliding_window", None)
    return "sliding_attention" if kind == "full_attention" and windowed else kind


def window_of(module: nn.Module) -> int | None:
    """Return how many keys a query of a sliding or chunked layer sees, None for other kinds."""
    kind = layer_type(module)
    if kind not in WINDOWED:
        return None
    name = "attention_chunk_size" if kind == "chunked_attention" else "sliding_window"
    config = getattr(module, "config", None)
    window = getattr(module, name, None) or getattr(config, name, None)
    return window if isinstance(window, int) else None


def moving_rope(config: Any) -> dict[str, Any] | None:
    """Return the rotary embeddings of a config that change with the length of the text, if any."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return next((kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")), None)


class LayerForm(NamedTuple):
    """What an attention layer is, whatever it is called with."""

    layer_idx: int | None  # its number; layers of Zamba share a module, numbered -1
    window: int | None  # tokens that a query of a sliding or chunked layer sees; None: all
    is_causal: bool
    is_cross: bool  # whether it attends to the keys of something else, such as an image
    # Why the layer is dense: empty if by design, None if its form does not forbid to be sparse.
    reason: str | None
    previous: str = "sdpa"  # the attention implementation before


def form_of(module: nn.Module) -> LayerForm:
    """Return what an attention layer is."""
    kind, cross = layer_type(module), is_cross_attention(module)
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    # A decoder with a config of its own, as T5Gemma's, names the width of the encoder.
    encoder = getattr(config, "cross_attention_hidden_size", None) is not None
    reason: str | None = None
    if cross or kind not in ("full_attention", *WINDOWED):
        reason = ""
    elif not isinstance(index, int):
        reason = NO_INDEX
    elif (
        encoder
        or getattr(config, "is_encoder_decoder", False)
        or getattr(module, "is_kv_shared_layer", False)
    ):
        reason = UNSUPPORTED
    number = index if isinstance(index, int) else None
    return LayerForm(number, window_of(module), is_causal(module), cross, reason)


@dataclass
class EnabledState:
    """The state of one enabled model."""

    config: PrefillConfig
    strict: bool = False  # raise where a call would be dense with a warning
    # The attention implementation that each config of the model had before.
    previous: list[tuple[Any, str | None]] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)  # reasons already warned of
    # Configs of self-attention layers that say that they are not causal: encoders, and decoders
    # that leave causality to their masks.
    causal_by_mask: list[Any] = field(default_factory=list)
    only_windows: bool = False  # whether every layer that can be sparse has a window
    # Whether layers with a window need no mask where it holds all keys.
    leaves_window_masks: bool = False
    windows: set[int | None] = field(default_factory=set)  # of layers that need no mask at all
    # Sparse and dense calls and rows by the number of the layer, as `LayerReport` has them, and why
    # its last long call was dense.
    counts: dict[Any, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: dict[Any, str] = field(default_factory=dict)
    errors: dict[int, Tensor] = field(default_factory=dict)  # of the last prompt, [B, Hkv, 4]
    forms: dict[nn.Module, LayerForm] = field(default_factory=dict)  # of its layers
    on: bool = False  # whether the model is enabled
    token_text: Tensor | None = None  # what lexical recall knows of the vocabulary

    def form_of(self, module: nn.Module) -> LayerForm:
        """Return what an attention layer is, looked at once."""
        if module not in self.forms:
            previous = self.previous_of(getattr(module, "config", None))
            self.forms[module] = form_of(module)._replace(previous=previous)
        return self.forms[module]

    def count(self, layer: Any, rows: int, reason: str | None) -> None:
        """Count a call of a layer, None: sparse; warn of a reason that is not by design."""
        how, counts = "sparse" if reason is None else "dense", self.counts[layer]
        counts[f"{how}_calls"] += 1
        counts[f"{how}_rows"] += rows
        if reason:
            self.reasons[layer] = reason
            self.report(f"dense attention: {reason}")

    def note_errors(self, layer: int | None, errors: Tensor | None) -> None:
        """Note the errors of a layer, [B, Hkv, 4], for reports."""
        if layer is not None and errors is not None:
            self.errors[layer] = errors

    def like(self, model: Any) -> Tensor:
        """Return an empty tensor of the model's dtype on its device."""
        return torch.empty(0, device=model.device, dtype=model.dtype)

    def resolve(self, model: Any, tokens: int) -> PrefillConfig:
        """Return the settings of a prompt of so many tokens, with `min_prefill` resolved."""
        return self.config.resolved(self.config.shortest_sparse_prompt(self.like(model)), tokens)

    @functools.cached_property
    def tokenizer(self) -> str:
        """What tells the text of the tokens from others, as fingerprints have it."""
        return "" if self.token_text is None else digest(self.token_text)

    def owns(self, hf_config: Any) -> bool:
        return any(config is hf_config for config, _ in self.previous)

    def previous_of(self, hf_config: Any) -> str:
        """Return the attention implementation that a config had before, sdpa if that is unknown."""
        name = next((name for config, name in self.previous if config is hf_config), None)
        return "sdpa" if name in (None, NAME) else str(name)

    def report(self, reason: str) -> None:
        """Warn of a reason once, or raise if strict."""
        if self.strict:
            raise NotImplementedError(f"h2o_prefill: {reason}")
        if reason not in self.reported:
            self.reported.add(reason)
            warn(f"h2o_prefill: {reason}")

    def mark(self, on: bool) -> None:
        """Note that the configs of this model are switched over, or as they were."""
        self.on = on
        for config, _ in self.previous:
            if on:
                switched[id(config)] = self
            else:
                switched.pop(id(config), None)


# For a model whose user set attn_implementation="h2o_prefill" and enabled nothing: it is dense.
DEFAULT_STATE = EnabledState(PRESETS["h2o"])


def enabled_of(hf_config: Any) -> Any:
    """Return the `EnabledState` that has switched a Hugging Face config over, None if none has."""
    enabled = switched.get(id(hf_config))
    return enabled if enabled is not None and enabled.owns(hf_config) else None


Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class LeftOutMask:
    """What no mask means, where our mask function has made none.

    The last of `queries` is the token before `end`. A query sees the keys up to its own token: all
    of them, those in its window, or those in its row of a padded batch.
    """

    window: int | None  # of the layers that the mask is for; None: they see all
    queries: int
    keys: int  # with the unused slots of a static cache, which lie after `end`
    first: int  # position of the first key
    end: int  # position after the last token
    spans: tuple[Span, ...] | None  # first token and end of every row of a padded batch
    # Makes the mask that the model's implementation takes, of other sizes if asked for.
    make: Callable[..., Any]

    @property
    def tokens(self) -> int:
        """Keys up to the last token."""
        return self.end - self.first

    @property
    def in_window(self) -> bool:
        """Whether the window hides keys."""
        return self.window is not None and (self.first > 0 or self.window < self.end)

    @property
    def is_plain(self) -> bool:
        """Whether every query sees all tokens up to its own."""
        return self.spans is None and not self.in_window
