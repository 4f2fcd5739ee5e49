"""Observe the queries, keys and values of each layer of a model while it runs densely."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from h2o_prefill.config import PrefillConfig
from h2o_prefill.hf import enable
from h2o_prefill.hf.attention import attend_densely
from h2o_prefill.hf.call import Attended, Call, dense_reason
from h2o_prefill.hf.kinds import NAME as SPARSE_NAME
from h2o_prefill.hf.masks import h2o_prefill_mask
from h2o_prefill.presets import PRESETS

# No "flash", "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill_observed"

# Called with a call and its dense output, [B, T, Hq, Dv].
Observer = Callable[[Call, Tensor], None]

_observer: ContextVar[Observer | None] = ContextVar("h2o_prefill_observer", default=None)


@contextlib.contextmanager
def observe_attention(
    model: PreTrainedModel, observe: Observer, dense_layers: tuple[int, ...] = ()
) -> Iterator[None]:
    """Call `observe(call, output)` for every layer that could be prefilled sparsely.

    The model's outputs do not change: attention stays dense. Layers that would be dense by design
    (sliding windows, `dense_layers`) are skipped. Raises what `enable` raises.
    """
    # Eligibility depends on the length of a call: chunks of two tokens let every prompt pass.
    short = PrefillConfig(chunk_size=2, local_window=1, heavy_budget=0, dense_layers=dense_layers)
    with _replaced_attention(model, short, _observed_attention, strict=True):
        token = _observer.set(observe)
        try:
            yield
        finally:
            _observer.reset(token)


def without_attention(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the layers that `enable` changes skip attention.

    What is left of a prefill's time is what no attention can go below.
    """
    return _replaced_attention(model, PRESETS["exact"], _skipped_attention)


@contextlib.contextmanager
def _replaced_attention(
    model: PreTrainedModel, config: PrefillConfig, attend: Any, strict: bool = False
) -> Iterator[None]:
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(h2o_prefill_mask))
    with enable(model, config, strict=strict):
        for module in model.modules():
            settings = getattr(module, "config", None)
            if getattr(settings, "_attn_implementation", None) == SPARSE_NAME:
                # `enable` restores the name that it found, so this one does not outlast the block.
                settings._attn_implementation_internal = NAME  # type: ignore[union-attr]
        yield


def _skipped_attention(*args: Any, **kwargs: Any) -> Attended:
    call = Call(*args, **kwargs)
    batch, heads, tokens, _ = call.query.shape
    return call.value.new_zeros(batch, tokens, heads, call.value.shape[-1]), None


def _observed_attention(*args: Any, **kwargs: Any) -> Attended:
    call = Call(*args, **kwargs)
    observe = _observer.get()
    attended = attend_densely(call)
    if call.context is not None and observe is not None:
        reason = dense_reason(call)
        if reason is None:
            observe(call, attended[0])
        elif reason:
            call.enabled.report(f"dense attention: {reason}")
    return attended
