"""The sparse way: one op a layer, and the state that the cache keeps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.hf.eligibility import Call
from h2o_prefill.recall import recall_lists
from h2o_prefill.state import PrefillState

NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"

RecallLists = tuple[Tensor | None, Tensor | None, Tensor | None]


def sparse_attention(call: Call, scaling: float | None) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it.

    Parameters
    ----------
    call : Call
        A call for which `dense_reason` is None.
    scaling : float, optional
        Factor of the logits, default D^-0.5.

    Returns
    -------
    Tensor
        [B, Tq, Hq, Dv].
    """
    config = call.config.of_layer(getattr(call.module, "layer_idx", None))
    layer, device = call.cache_layer, call.query.device
    query, key, value = _in_autocast_dtype(call.query, call.key, call.value)
    state = None if layer is None else layer.state
    out, scores, memory = ops.chunked_sparse_attention(
        query,
        key,
        value,
        None if state is None else state.scores.to(device),
        None if state is None else state.memory.to(device),
        *_recall_lists(call),
        # Without a state all that came before is candidate for the first memory set, with score 0.
        0 if state is None else state.last_chunk_begin,
        config.chunk_size,
        config.local_window,
        config.heavy_budget,
        config.sink_tokens,
        config.dense_tail,
        config.gqa_reduce,
        config.recall_block,
        scaling,
    )
    if layer is not None:
        layer.state = PrefillState(
            scores=scores,
            memory=memory,
            length=call.past + call.new,
            last_chunk_begin=config.next_chunk_begin(call.past, call.new),
        )
    return out.transpose(1, 2).contiguous()


def _recall_lists(call: Call) -> RecallLists:
    """Return the lists of recalled keys on the call's device, made once per forward."""
    run, config, device = call.run, call.config, call.query.device
    if run is None or config.recall == 0:
        return None, None, None
    lists: RecallLists = run.shared("recall", lambda: _find_recalled(call))
    moved: RecallLists = run.shared(
        ("recall", device), lambda: tuple(None if x is None else x.to(device) for x in lists)
    )
    return moved


def _find_recalled(call: Call) -> RecallLists:
    run, config = call.run, call.config
    assert run is not None
    ids = run.token_ids()
    if ids is None or ids.shape != (call.query.shape[0], call.key.shape[2]):
        run.settings.report(NO_IDS)
        return None, None, None
    return recall_lists(ids.to("cpu", torch.int64), call.past, config)


def _in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention: RoPE leaves fp32 queries beside 16-bit values."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
