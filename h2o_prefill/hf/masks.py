"""The mask function named `h2o_prefill`: no mask where the attention function knows what it says.

These are masks that are plain causal, of a window, or of rows with padding on their sides. What no
mask means then, the running forward knows as a `LeftOutMask`. Everything else is the mask that the
model's own implementation would have got.
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
from h2o_prefill.hf.call import GRAPH_BREAK, LEFT_OUT
from h2o_prefill.hf.forward import (
    EnabledState,
    ForwardContext,
    Prompt,
    call_in_graph,
    current_context,
    is_traced,
    prompt_of,
)
from h2o_prefill.hf.kinds import NAME, LeftOutMask, Span, enabled_of
from h2o_prefill.hf.rules import NOT_CAUSAL, PADDED

# Arguments that some versions of transformers leave out.
DEFAULTS = {"q_offset": 0, "kv_offset": 0, "attention_mask": None}


def h2o_prefill_mask(**kwargs: Any) -> Any:
    """Return None where the running forward knows what that means, else the mask.

    Called by transformers once for each mask type of a forward, with the arguments of `sdpa_mask`.
    """
    arguments = {"mask_function": causal_mask_function, **DEFAULTS, **kwargs}
    return _mask(arguments) if call_in_graph() is None else _mask_in_graph(arguments)


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
    if place is not None and enabled is not None:
        left_out = _left_out(arguments, enabled, place, make)
        if left_out is not None:
            place.masks.append(left_out)
            return None
    # With the unused slots of a static cache, no mask would be causal from the first key on; and a
    # model that was never enabled may attend eagerly.
    if enabled is None or _ends_differ(arguments):
        return make(allow_is_causal_skip=False)
    return make()


def _left_out(
    arguments: dict[str, Any],
    enabled: EnabledState,
    place: ForwardContext | Prompt,
    make: Callable[..., Any],
) -> LeftOutMask | None:
    """Return what a mask says, None if it must be made."""
    queries, keys = arguments["q_length"], arguments["kv_length"]
    window, first = arguments.get("local_size"), arguments["kv_offset"]
    end, context = first + keys, place if isinstance(place, ForwardContext) else None
    # A window's function is made anew each time: it is the plain one of that window where
    # transformers allows to leave causal masks out.
    plain = window is not None or arguments["mask_function"] is causal_mask_function
    if not _may_be_left_out(arguments) or not plain:
        if context is not None and not plain:
            context.mask_reason = NOT_CAUSAL
        return None
    # What was left out for keys of this number before is of another mask.
    place.masks = [x for x in place.masks if (x.window, x.keys) != (window, keys)]
    if window is None:
        if _ends_differ(arguments):
            static = context is None or isinstance(context.cache, StaticPrefillCache)
            end = int(arguments["q_offset"]) + queries
            if not static or queries == 1 or first != 0 or end > keys:
                return None
        elif first != 0:
            return None
    elif not enabled.leaves_window_masks or _ends_differ(arguments):
        return None
    left_out = partial(LeftOutMask, window, queries, keys, first, end)
    # Checkpointed layers run again in the backward pass, where no forward knows of this.
    unknown = torch.is_grad_enabled() or window not in enabled.windows
    if window is not None and (first > 0 or window < end) and unknown:
        return None
    if is_unpadded(arguments["attention_mask"], end):
        return left_out(None, make)
    if context is None or queries == 1 or end != first + keys:
        return None
    context.mask_reason = PADDED
    spans = None
    # The model's own attention takes short rows together.
    if (first, queries) == (0, keys) and keys > context.config.chunk_size:
        spans = _spans(arguments)
    return None if spans is None else left_out(spans, make)


def _spans(arguments: dict[str, Any]) -> tuple[Span, ...] | None:
    """Return where the rows of a padded batch lie, None if their mask cannot be left out."""
    mask = arguments["attention_mask"]
    if torch.is_grad_enabled() or len(mask) != arguments["batch_size"]:
        return None
    return row_spans(mask, arguments["kv_length"])


def _may_be_left_out(arguments: dict[str, Any]) -> bool:
    return arguments.get("allow_is_causal_skip", True) and not arguments.get("use_vmap", False)


def _ends_differ(arguments: dict[str, Any]) -> bool:
    """Return whether the last key is another token than the last query, or may be."""
    offset = arguments["q_offset"]
    end = arguments["kv_offset"] + arguments["kv_length"]
    return isinstance(offset, Tensor) or offset + arguments["q_length"] != end


def _mask_in_graph(arguments: dict[str, Any]) -> Tensor:
    """Return the bool mask of PyTorch's attention, marked if it need not be made.

    A graph that has no use for it does not compute it.
    """
    mask = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    assert mask is not None
    if arguments["attention_mask"] is None and _may_be_left_out(arguments):
        window = arguments.get("local_size")
        if window is None:
            known = arguments["mask_function"] is causal_mask_function
        else:
            known = not _ends_differ(arguments)
        if known:
            setattr(mask, LEFT_OUT, (window,))
    return mask


def _previous_mask_function(enabled: EnabledState | None, hf_config: Any) -> Callable[..., Any]:
    name = None if enabled is None else enabled.previous_of(hf_config)
    if name is None or name == NAME:
        return sdpa_mask
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
