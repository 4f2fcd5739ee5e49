"""Kinds of attention layers, their windows, and the padding of rows.

Which config is switched over stands here as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The name under which transformers finds our attention function and mask function. No "flash",
# "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill"

# The `EnabledState` of each Hugging Face config that is switched over, under the config's id:
# several models may share one config object, and then the switch of one reaches the others.
switched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# Kinds of layers that attend as full ones do to a prompt that their window holds.
WINDOWED = ("sliding_attention", "hybrid_sliding", "chunked_attention")


def heads_by_layer(model: Any) -> list[int]:
    """Return the KV heads of each decoder layer, as a model's config has them; none if unknown."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    names = "num_hidden_layers", "num_key_value_heads", "num_attention_heads"
    layers, heads, query_heads = (getattr(config, name, None) for name in names)
    if not layers:
        return []
    heads = heads or query_heads or 1
    if isinstance(heads, int):
        return [heads] * (layers if isinstance(layers, int) else max(layers))
    return [number or 0 for number in heads]  # a layer without attention has none


def count_heads(model: Any) -> tuple[int, int]:
    """Return the decoder layers of a model and the most KV heads of a layer; 1 where unknown."""
    heads = heads_by_layer(model) or [1]
    return len(heads), max(heads)


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


@dataclass(frozen=True, eq=False)
class Padding:
    """A forward into an empty cache whose rows have padding on the left, on the right, or both."""

    spans: tuple[Span, ...]  # first token and end of every row; equal where a row is all padding
    # Makes the mask that the model's own attention implementation takes.
    make_mask: Callable[[], Any]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend_rows: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Attend with every row as if it were alone; return [B, T, Hq, Dv], 0 in padding.

        The operators take rows of one length, so those that lie in the same place go together.
        """
        batch, heads, length = query.shape[:3]
        out = query.new_zeros(batch, length, heads, value.shape[3])
        places: dict[Span, list[int]] = {}
        for row, span in enumerate(self.spans):
            places.setdefault(span, []).append(row)
        for (first, end), found in places.items():
            if first < end:
                rows = _as_index(found)
                q, k, v = (x[:, :, first:end][rows] for x in (query, key, value))
                out[rows, first:end] = attend_rows(q, k, v).transpose(1, 2)
        return out


def is_unpadded(attention_mask: Tensor | None, length: int) -> bool:
    """Return whether none of the first keys is padding."""
    if attention_mask is None:
        return True
    return attention_mask.shape[-1] >= length and bool(attention_mask[:, :length].all())


def row_spans(attention_mask: Tensor, length: int) -> tuple[Span, ...] | None:
    """Return first token and end of every row, None if padding lies between tokens of a row."""
    real = attention_mask[:, :length].bool()
    real = torch.nn.functional.pad(real, (0, length - real.shape[1]))
    columns = torch.arange(length, device=real.device)
    bounds = torch.stack(
        [
            torch.where(real, columns, length).amin(dim=1),
            torch.where(real, columns + 1, 0).amax(dim=1),
            real.sum(dim=1),
        ],
        dim=1,
    ).tolist()  # one transfer from the device
    if any(tokens not in (0, end - first) for first, end, tokens in bounds):
        return None
    return tuple((first, end) if tokens else (0, 0) for first, end, tokens in bounds)


def _as_index(rows: list[int]) -> slice | list[int]:
    """Return neighbouring rows as a slice, which copies nothing."""
    begin, end = rows[0], rows[-1] + 1
    return slice(begin, end) if end - begin == len(rows) else rows


@dataclass(frozen=True, eq=False)
class Window:
    """What the mask of a window would have said, which our mask function has left out."""

    queries: int  # of the call
    keys: int  # what the cache keeps of the history, and the call's tokens
    end: int  # position after the last key
    padding: Padding | None
    # Makes the mask that the model's own attention implementation takes.
    make_mask: Callable[[], Any]


# Windows whose masks were left out before the forward: `generate` makes masks of static caches.
windows_ahead: ContextVar[dict[int, Window]] = ContextVar("h2o_prefill_windows", default={})  # noqa: B039
