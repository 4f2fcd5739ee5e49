"""The mask function of the name `h2o_prefill`: no mask where attention is plain causal.

Contract with the attention function: a mask of None made here means that query i of Tq sees the
keys up to Tkv - Tq + i, and all of them, or, if `Run.padding` is set, those of its row that are no
padding. Everything else is the mask that the model's own implementation would have got.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
)

from h2o_prefill.hf.names import NAME
from h2o_prefill.hf.padding import CONTINUES, Padding, row_spans
from h2o_prefill.hf.run import Run, current_run, is_traced

HOLES = "attention_mask has holes; padding is supported at the ends of rows only"
GRADIENTS = (
    "attention_mask holds padding while gradients are on; run under torch.no_grad() or "
    "torch.inference_mode()"
)
PACKED = (
    "a compiled model without a cache and without attention_mask is taken for one of packed "
    "sequences by transformers; pass attention_mask=torch.ones_like(input_ids)"
)
NOT_CAUSAL = "the attention mask is not plain causal (packed sequences, or an overlaid mask)"


def h2o_prefill_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Return None for plain causal attention, else the mask that the previous implementation takes.

    Padded rows that may be sparse get None too, and their `Padding` is kept in the run.

    Called by transformers once for each mask type of a forward.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        B, Tq, Tkv.
    q_offset : int or Tensor
        Position of the first query; a tensor for a static cache.
    kv_offset : int
        Position of the first key.
    mask_function : callable
        What transformers wants masked.
    attention_mask : Tensor, optional
        bool [B, Tkv], False at padding.
    **kwargs
        `local_size`, `allow_is_causal_skip`, `use_vmap`, `dtype`, `config`, `device` and what
        comes.
    """
    run = current_run(kwargs.get("config"))
    make = _previous_mask_function(run, kwargs.get("config"))
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **kwargs,
    }
    if run is not None and (is_traced() or run.settings.is_causal_by_mask(kwargs.get("config"))):
        return make(**arguments)
    if _is_causal_history(q_length, kv_length, q_offset, kv_offset, mask_function, kwargs):
        if run is not None:
            run.plain.discard((q_length, kv_length))
            run.padding = None
        if _is_unpadded(attention_mask, kv_length):
            if run is not None:
                run.plain.add((q_length, kv_length))
            return None
        if run is not None and q_length > 1:
            padding = _padding(run, arguments, make)
            if padding is not None and padding.has_long_row(run.settings.config):
                return None
    elif (
        run is not None
        and mask_function is not causal_mask_function
        and kwargs.get("local_size") is None
    ):
        run.mask_reason = PACKED if run.assumed_packed else NOT_CAUSAL
    mask = make(**arguments)
    if mask is None and _ends_differ(q_length, kv_length, q_offset, kv_offset):
        # A static cache with free places: this None is top-left causal, which ours is not.
        mask = make(**{**arguments, "allow_is_causal_skip": False})
    return mask


def _is_causal_history(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    kwargs: dict[str, Any],
) -> bool:
    """Return whether the keys are exactly the tokens up to the last query, causally masked."""
    return (
        mask_function is causal_mask_function
        and kwargs.get("local_size") is None
        and kwargs.get("allow_is_causal_skip", True)
        and not kwargs.get("use_vmap", False)
        and not _ends_differ(q_length, kv_length, q_offset, kv_offset)
        and kv_offset == 0
    )


def _ends_differ(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> bool:
    """Return whether the last key is another token than the last query."""
    return not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length


def _is_unpadded(attention_mask: Tensor | None, kv_length: int) -> bool:
    """Return whether no key is padding; a mask shorter than the keys means padding after it."""
    if attention_mask is None:
        return True
    return attention_mask.shape[-1] >= kv_length and bool(attention_mask[:, :kv_length].all())


def _padding(run: Run, arguments: dict[str, Any], make: Callable[..., Any]) -> Padding | None:
    """Put the padding of a forward into its run, or the reason why it needs its mask."""
    attention_mask, length = arguments["attention_mask"], arguments["kv_length"]
    if arguments["q_offset"] > 0:
        run.mask_reason = CONTINUES
        return None
    if torch.is_grad_enabled():
        # Checkpointed layers run again in the backward pass, where no run knows of the padding.
        run.mask_reason = GRADIENTS
        return None
    whole = attention_mask.shape[0] == arguments["batch_size"]
    spans = row_spans(attention_mask, length) if whole else None
    if spans is None:
        run.mask_reason = HOLES
        return None
    run.padding = Padding(length, spans, partial(make, **arguments))
    return run.padding


def _previous_mask_function(run: Run | None, hf_config: Any) -> Callable[..., Any]:
    name = None if run is None else run.settings.previous_of(hf_config)
    if name is None or name == NAME:
        return sdpa_mask
    make: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS.get(name, sdpa_mask)
    return make
