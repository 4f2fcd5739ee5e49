"""The mask function named `h2o_prefill`: no mask where the running forward knows what it says.

A `LeftOutMask` is plain causal, of a window, or of rows with padding on their sides. Every other
mask is made as the model's own implementation takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask

from h2o_prefill.hf.cache import StaticPrefillCache
from h2o_prefill.hf.call import LEFT_OUT
from h2o_prefill.hf.forward import (
    GRAPH_BREAK,
    PADDED,
    EnabledState,
    ForwardContext,
    Prompt,
    call_in_graph,
    current_context,
    is_traced,
    prompt_of,
)
from h2o_prefill.hf.kinds import LeftOutMask, Span, enabled_of


def h2o_prefill_mask(**kwargs: Any) -> Any:
    """Return None or a mask; takes the arguments of `sdpa_mask`, once for each mask type."""
    return _mask(kwargs) if call_in_graph() is None else _mask_in_graph(kwargs)


@torch.compiler.disable(reason=GRAPH_BREAK)
def _mask(arguments: dict[str, Any]) -> Any:
    config = arguments.get("config")
    context = current_context(config)
    enabled = enabled_of(config) if context is None else context.enabled
    make = partial(_previous_mask_function(enabled, config), **arguments)
    by_mask = enabled is not None and any(config is one for one in enabled.causal_by_mask)
    # Transformers makes the masks of a static cache before the forward.
    place = prompt_of(enabled) if context is None else context
    if is_traced() or by_mask:
        return make()
    left_out = None if place is None else _left_out(arguments, place, make)
    if place is not None and left_out is not None:
        place.masks.append(left_out)
        return None
    # With the unused slots of a static cache, no mask would be causal from the first key on; and a
    # model that was never enabled may attend eagerly.
    if enabled is None or _ends_differ(arguments):
        return make(allow_is_causal_skip=False)
    return make()


def _left_out(
    arguments: dict[str, Any], place: ForwardContext | Prompt, make: Callable[..., Any]
) -> LeftOutMask | None:
    """Return what a mask says, None if it must be made."""
    queries, keys, mask = (arguments[x] for x in ("q_length", "kv_length", "attention_mask"))
    window, first, enabled = arguments.get("local_size"), arguments["kv_offset"], place.enabled
    end, context = first + keys, place if isinstance(place, ForwardContext) else None
    if not _is_causal(arguments):
        return None
    # What was left out for keys of this number before is of another mask.
    place.masks = [x for x in place.masks if (x.window, x.keys) != (window, keys)]
    if window is not None:
        # Checkpointed layers run again in the backward pass, where no forward knows of this.
        unknown = torch.is_grad_enabled() or window not in enabled.windows
        hides = first > 0 or window < end
        if not enabled.leaves_window_masks or _ends_differ(arguments) or (hides and unknown):
            return None
    elif _ends_differ(arguments):
        static = context is None or isinstance(context.cache, StaticPrefillCache)
        end = int(arguments["q_offset"]) + queries
        if not static or queries == 1 or first != 0 or end > keys:
            return None
    elif first != 0:
        return None
    spans = None
    if not is_unpadded(mask, end):
        if context is None or queries == 1 or end != first + keys:
            return None
        context.mask_reason = PADDED
        # The model's own attention takes short rows together.
        whole = (first, queries) == (0, keys) and keys > context.config.chunk_size
        if whole and not torch.is_grad_enabled() and len(mask) == arguments["batch_size"]:
            spans = row_spans(mask, keys)
        if spans is None:
            return None
    return LeftOutMask(window, queries, keys, first, end, spans, make)


def _is_causal(arguments: dict[str, Any]) -> bool:
    """Return whether a mask hides no key but later ones, those beyond a window, and padding."""
    # A window's function is made anew each time: it is the plain one of that window where
    # transformers allows to leave causal masks out.
    skips = arguments.get("allow_is_causal_skip", True) and not arguments.get("use_vmap", False)
    plain = arguments["mask_function"] is causal_mask_function
    return skips and (plain or arguments.get("local_size") is not None)


def _ends_differ(arguments: dict[str, Any]) -> bool:
    """Return whether the last key is another token than the last query, or may be."""
    offset = arguments["q_offset"]
    end = arguments["kv_offset"] + arguments["kv_length"]
    return isinstance(offset, Tensor) or offset + arguments["q_length"] != end


def _mask_in_graph(arguments: dict[str, Any]) -> Tensor:
    """Return the bool mask of PyTorch's attention, marked if it need not be made."""
    # A graph that has no use for it does not compute it.
    mask = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    assert mask is not None
    window = arguments.get("local_size")
    whole = window is None or not _ends_differ(arguments)
    if arguments["attention_mask"] is None and _is_causal(arguments) and whole:
        setattr(mask, LEFT_OUT, (window,))
    return mask


def _previous_mask_function(enabled: EnabledState | None, hf_config: Any) -> Callable[..., Any]:
    name = "sdpa" if enabled is None else enabled.previous_of(hf_config)
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask)


def is_unpadded(attention_mask: Tensor | None, length: int) -> bool:
    """Return whether none of the first keys is padding."""
    if attention_mask is None:
        return True
    return attention_mask.shape[-1] >= length and bool(attention_mask[:, :length].all())


def row_spans(attention_mask: Tensor, length: int) -> tuple[Span, ...] | None:
    """Return first token and end of every row, None if padding lies between tokens of a row."""
    real = attention_mask[:, :length].bool()
    real = pad(real, (0, length - real.shape[1]))
    columns = torch.arange(length, device=real.device)
    first = torch.where(real, columns, length).amin(dim=1)
    end = torch.where(real, columns + 1, 0).amax(dim=1)
    # One transfer from the device.
    bounds = torch.stack([first, end, real.sum(dim=1)], dim=1).tolist()
    if any(tokens not in (0, end - first) for first, end, tokens in bounds):
        return None
    return tuple((first, end) if tokens else (0, 0) for first, end, tokens in bounds)
