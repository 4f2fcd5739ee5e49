"""The mask function named `h2o_prefill`: no mask where attention is plain causal, or in a window.

A sliding window, or a chunk, that holds all keys counts as plain causal.

Contract with the attention function: a mask of None made here means that query i of Tq sees the
keys up to T - Tq + i, where T is the number of keys without the unused slots of a static cache, and
all of them, or, if `ForwardContext.paddings` has that length, the keys of its row that are no
padding.
In a layer whose window `ForwardContext.windows` has, it means what that says.
Everything else is the mask that the model's own implementation would have got.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask

from h2o_prefill.hf.cache import StaticPrefillCache
from h2o_prefill.hf.dense import WINDOW
from h2o_prefill.hf.forward import (
    EnabledState,
    GraphCall,
    call_in_graph,
    current_context,
    is_traced,
)
from h2o_prefill.hf.kinds import (
    NAME,
    Padding,
    Window,
    enabled_of,
    is_unpadded,
    row_spans,
    windows_ahead,
)
from h2o_prefill.hf.rules import PADDED, PLAIN

NOT_CAUSAL = "the attention mask is not plain causal (packed sequences, or an overlaid mask)"


# Arguments that some versions of transformers leave out.
DEFAULTS = {"q_offset": 0, "kv_offset": 0, "attention_mask": None}


def may_be_left_out(arguments: dict[str, Any]) -> bool:
    """Return whether a mask function may leave out a mask that is plain causal."""
    return arguments.get("allow_is_causal_skip", True) and not arguments.get("use_vmap", False)


def ends_differ(arguments: dict[str, Any]) -> bool:
    """Return whether the last key is another token than the last query, or may be."""
    offset = arguments["q_offset"]
    end = arguments["kv_offset"] + arguments["kv_length"]
    return isinstance(offset, Tensor) or offset + arguments["q_length"] != end


def _mask_in_graph(arguments: dict[str, Any], forward: GraphCall) -> Tensor:
    """Return the bool mask of PyTorch's attention, marked if it is plain causal."""
    given = arguments["attention_mask"]
    if given is not None and forward.unpadded:
        forward.hidden.append(_hides_keys(given, arguments["q_offset"] + arguments["q_length"]))
        given = None
    changed = {"attention_mask": given, "allow_is_causal_skip": False}
    mask = sdpa_mask(**{**arguments, **changed})
    assert mask is not None
    if given is None and may_be_left_out(arguments):
        window = arguments.get("local_size")
        if window is not None and not ends_differ(arguments):
            setattr(mask, WINDOW, window)
        elif window is None and arguments["mask_function"] is causal_mask_function:
            setattr(mask, PLAIN, True)
    return mask


def _hides_keys(mask: Tensor, length: int | Tensor) -> Tensor:
    """Return whether a mask [B, T], perhaps made by the model, hides one of the first keys."""
    seen = torch.arange(mask.shape[1], device=mask.device) < length
    return (seen & ~mask.bool()).any()


def h2o_prefill_mask(**given: Any) -> Any:
    """Return None for plain causal attention, else the mask that the previous implementation takes.

    A first call of padded rows, longer than a chunk, gets None too: the context has its `Padding`.

    Called by transformers once for each mask type of a forward, with the arguments of `sdpa_mask`.
    """
    arguments = {"mask_function": causal_mask_function, **DEFAULTS, **given}
    forward = call_in_graph()
    return _mask(arguments) if forward is None else _mask_in_graph(arguments, forward)


@torch.compiler.disable
def _mask(arguments: dict[str, Any]) -> Any:
    config, attention_mask = arguments.get("config"), arguments["attention_mask"]
    context = current_context(config)
    enabled = enabled_of(config) if context is None else context.enabled
    make = _previous_mask_function(None if context is None else context.enabled, config)
    by_mask = enabled is not None and any(config is one for one in enabled.causal_by_mask)
    if context is not None and (is_traced() or by_mask):
        return make(**arguments)
    differ = ends_differ(arguments)
    changed = arguments["mask_function"] is not causal_mask_function
    window: Any = arguments.get("local_size")
    shows_all = window is None
    if context is not None and window is not None and context.enabled.leaves_window_masks:
        shows_all = window >= arguments["kv_length"] and arguments["kv_offset"] == 0 and not differ
        context.windows_show_all = shows_all and context.windows_show_all is not False
    # Transformers makes the masks of a static cache before the forward, where there is no context.
    if context is None:
        static = enabled is not None and not getattr(config, "is_encoder_decoder", False)
    else:
        static = isinstance(context.cache, StaticPrefillCache)
    total = _causal_history(arguments, static) if shows_all else None
    if total is not None:
        size = arguments["q_length"], total
        if context is not None:
            context.plain.discard(size)
            context.paddings.pop(size[0], None)
        if is_unpadded(attention_mask, total):
            if context is not None:
                context.add_plain(*size, arguments["kv_length"])
            return None
        if context is not None and arguments["q_length"] > 1 and total == arguments["kv_length"]:
            context.mask_reason = PADDED
            # The model's own attention takes short rows together.
            is_long = total > context.config.chunk_size
            padding = _padding(arguments, make) if is_long else None
            if padding is not None:
                context.paddings[total] = padding
                return None
    elif context is not None and shows_all and changed:
        context.mask_reason = NOT_CAUSAL
    if enabled is not None and window in enabled.windows and not (shows_all or differ or by_mask):
        left_out = _window(enabled, arguments)
        if left_out is not None and context is not None:
            context.windows[window] = left_out
            return None
        # Graphs have no operator for chunks, and this forward may be compiled.
        if left_out is not None and enabled.windows[window] != "chunked_attention":
            windows_ahead.set({**windows_ahead.get(), window: left_out})
            return None
    mask = make(**arguments)
    if mask is None and differ:
        # A static cache with unused slots: this None is top-left causal, which ours is not.
        mask = make(**{**arguments, "allow_is_causal_skip": False})
    return mask


def _causal_history(arguments: dict[str, Any], may_be_static: bool) -> int | None:
    """Return the number of keys that are the tokens up to the last query, causally masked.

    A window, if there is one, holds them all; keys after the last query may be the unused slots of
    a static cache. None if the mask is another.
    """
    # A window's mask function is made anew each time. It is the plain one of that window where
    # transformers allows to leave causal masks out.
    if not may_be_left_out(arguments) or arguments["kv_offset"] != 0:
        return None
    if arguments["mask_function"] is not causal_mask_function and not arguments.get("local_size"):
        return None
    if not ends_differ(arguments):
        return int(arguments["kv_length"])
    if not may_be_static or arguments["q_length"] == 1:
        return None
    total = int(arguments["q_offset"]) + int(arguments["q_length"])
    return total if total <= arguments["kv_length"] else None


def _padding(arguments: dict[str, Any], make: Callable[..., Any]) -> Padding | None:
    """Return where the rows of a padded batch lie, None if their mask cannot be left out."""
    mask = arguments["attention_mask"]
    # Checkpointed layers run again in the backward pass, where no context knows of the padding.
    if arguments["q_offset"] > 0 or torch.is_grad_enabled() or len(mask) != arguments["batch_size"]:
        return None
    spans = row_spans(mask, arguments["kv_length"])
    return None if spans is None else Padding(spans, partial(make, **arguments))


def _window(enabled: EnabledState, arguments: dict[str, Any]) -> Window | None:
    """Return what the mask of a window says, if it may be left out."""
    # Checkpointed layers run again in the backward pass, where no context knows of the window.
    if torch.is_grad_enabled() or not may_be_left_out(arguments):
        return None
    length, offset, padding = arguments["kv_length"], arguments["kv_offset"], None
    make = _previous_mask_function(enabled, arguments.get("config"))
    if not is_unpadded(arguments["attention_mask"], offset + length):
        padding = _padding(arguments, make) if offset == 0 else None
        if padding is None:
            return None
    remake = partial(make, **arguments)
    return Window(arguments["q_length"], length, offset + length, padding, remake)


def _previous_mask_function(enabled: EnabledState | None, hf_config: Any) -> Callable[..., Any]:
    name = None if enabled is None else enabled.previous_of(hf_config)
    if name is None or name == NAME:
        return sdpa_mask
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask)
