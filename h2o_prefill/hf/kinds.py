"""The kind of attention that a layer computes, and whether its config is switched over."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from h2o_prefill.config import PrefillConfig

# The name under which transformers finds our attention function and mask function. No "flash",
# "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill"

# The `EnabledState` of each Hugging Face config that is switched over, under the config's id:
# several models may share one config object, and then the switch of one reaches the others.
switched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# Kinds of layers that attend as full ones do to a prompt that their window holds.
WINDOWED = ("sliding_attention", "hybrid_sliding", "chunked_attention")

# Kinds of layers that are never sparse, or but for such prompts, as the user reads of them.
_IN_WORDS = {
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "reference_sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "of keys that the model chooses itself",
    "minimax_m3_sparse": "of keys that the model chooses itself",
    "compressed_sparse_attention": "to compressed keys",
    "heavily_compressed_attention": "to compressed keys",
}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention layer, or a part of one."""
    name = type(module).__name__
    return any(word in name for word in ("Attention", "Attn", "MLA"))


def is_cross_attention(module: nn.Module, path: str = "") -> bool:
    """Return whether a layer attends to the keys of something else, such as an image."""
    parts = [type(module).__name__, *path.split(".")]
    return bool(getattr(module, "is_cross_attention", False)) or any(
        "cross" in part.lower() or part in ("encoder_attn", "EncDecAttention") for part in parts
    )


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a layer is causal: the argument if given, else what module and config say."""
    if is_cross_attention(module):
        return False
    given = kwargs.get("is_causal")
    if given is not None:
        return bool(given)
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


def attends_to_tokens_alone(module: nn.Module) -> bool:
    """Return whether a layer is of a kind that adds nothing to the mask that it is given.

    DeepSeek V4 adds what hides compressed keys to that of its window, if there is one.
    """
    return layer_type(module) in ("full_attention", "linear_attention", *WINDOWED)


def chooses_keys(module: nn.Module) -> bool:
    """Return whether a layer reads its mask to choose keys, as those of DSA and Doge do."""
    return getattr(module, "indexer", None) is not None or hasattr(module, "prepare_dynamic_mask")


def can_be_sparse(module: nn.Module, config: PrefillConfig) -> bool:
    """Return whether some calls of an attention layer are sparse, by what kind it is of."""
    if not is_causal(module, {}):
        return False
    window = window_of(module)
    if window is not None:
        return window > config.chunk_size and config.is_long_call(0, window)
    return layer_type(module) == "full_attention"


def why_none_sparse(
    layers: list[nn.Module], config: PrefillConfig, encoder_decoder: bool = False
) -> str | None:
    """Return why no layer of a model can be sparse; None if one can."""
    if any(can_be_sparse(layer, config) for layer in layers):
        return None
    not_causal = "that of an encoder-decoder" if encoder_decoder else "not causal"
    kinds = [layer_type(x) if is_causal(x, {}) else not_causal for x in layers]
    # Each once, in the order of the layers.
    return " or ".join(dict.fromkeys(_IN_WORDS.get(kind, kind) for kind in kinds))


def enabled_of(hf_config: Any) -> Any:
    """Return the `EnabledState` that has switched a Hugging Face config over, None if none has."""
    enabled = switched.get(id(hf_config))
    return enabled if enabled is not None and enabled.owns(hf_config) else None
