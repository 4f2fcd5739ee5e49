"""Kinds of attention layers, their windows, and what no mask means in them.

Which config is switched over stands here as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

# The name under which transformers finds our attention function and mask function. No "flash",
# "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill"

# The `EnabledState` of each Hugging Face config that is switched over, under the config's id:
# several models may share one config object, and then the switch of one reaches the others.
switched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

NO_INDEX = "the attention layers do not know their index"
ENCODER_DECODER = "encoder-decoder models are not supported"
SHARED_KEYS = "layers that share the keys of another layer are not supported"

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
    if is_cross_attention(module):
        return False
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True)) and bool(getattr(config, "is_causal", True))


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
    if kind == "full_attention" and windowed:
        return "sliding_attention"
    return kind


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
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One for all layers, or one for each kind of layer.
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return next((kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")), None)


def longest_text(config: Any) -> int | None:
    """Return how many tokens a model was made for, None if its config does not say.

    Dynamic rotary embeddings are for any number.
    """
    config = config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    rope = moving_rope(config)
    dynamic = rope is not None and rope["rope_type"] == "dynamic"
    return None if dynamic or not isinstance(longest, int) else longest


def enabled_of(hf_config: Any) -> Any:
    """Return the `EnabledState` that has switched a Hugging Face config over, None if none has."""
    enabled = switched.get(id(hf_config))
    return enabled if enabled is not None and enabled.owns(hf_config) else None


Span = tuple[int, int]


class LayerForm(NamedTuple):
    """What an attention layer is, whatever it is called with."""

    window: int | None  # tokens that a query of a sliding or chunked layer sees; None: all
    is_causal: bool
    is_cross: bool  # whether it attends to the keys of something else, such as an image
    # Why the layer is dense: empty if by design, None if its form does not forbid to be sparse.
    reason: str | None


def form_of(module: nn.Module) -> LayerForm:
    """Return what an attention layer is."""
    kind, cross = layer_type(module), is_cross_attention(module)
    causal, config = is_causal(module), getattr(module, "config", None)
    index = getattr(module, "layer_idx", None)
    reason: str | None = None
    # A decoder with a config of its own, as T5Gemma's, names the width of the encoder.
    encoder = getattr(config, "cross_attention_hidden_size", None) is not None
    if cross or kind not in ("full_attention", *WINDOWED):
        reason = ""
    elif not isinstance(index, int):
        reason = NO_INDEX
    elif encoder or getattr(config, "is_encoder_decoder", False):
        reason = ENCODER_DECODER
    elif _shares_keys(module, config):
        reason = SHARED_KEYS
    return LayerForm(window_of(module), causal, cross, reason)


def _shares_keys(module: nn.Module, config: Any) -> bool:
    if getattr(module, "is_kv_shared_layer", False):
        return True
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    layers: int = getattr(config, "num_hidden_layers", None) or 0
    return shared > 0 and getattr(module, "layer_idx", 0) >= layers - shared


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
    # Makes the mask that the model's own attention implementation takes, of other sizes if given.
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
