"""The sparse way: one op a layer, and the state that the cache keeps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import NO_RECALL, RecallLists, recall_lists, sparse_attention
from h2o_prefill.hf.eligibility import Call

NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"


def attend_sparsely(call: Call, scaling: float | None) -> Tensor:
    """Prefill one layer sparsely and keep its state, if the cache has a place for it.

    Parameters
    ----------
    call : Call
        A call for which `dense_reason` is None.
    scaling : float, optional
        Softmax scale, default D^-0.5.

    Returns
    -------
    Tensor
        [B, Tq, Hq, Dv].
    """
    number = int(call.module.layer_idx)  # type: ignore[arg-type]
    layer, recall = call.cache_layer, _recall_lists(call)
    query, key, value = _in_autocast_dtype(call.query, call.key, call.value)
    rows, total = call.prompt_rows, call.past + call.prompt_rows
    prompt = query[:, :, :rows]
    if layer is not None and layer.holds(key, value):
        assert call.run is not None
        call.run.keep_state(layer)
        out = layer.attend(prompt, total, recall, number, call.config, scaling)
    else:
        state = None if layer is None else layer.state
        config = call.config.of_layer(number)
        out, state = sparse_attention(
            prompt, key[:, :, :total], value[:, :, :total], state, config, recall, scaling
        )
        if layer is not None:
            layer.state = state
    if call.candidates > 0:
        # They attend as decoded tokens do, and leave no trace in the state.
        verified = ops.dense_attention(query[:, :, rows:], key, value, scaling)
        out = torch.cat([out, verified], dim=2)
    return out.transpose(1, 2).contiguous()


def _recall_lists(call: Call) -> RecallLists:
    """Return the lists of recalled keys on the call's device, made once per forward."""
    run, config, device = call.run, call.config, call.query.device
    if run is None or config.recall == 0:
        return NO_RECALL
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
        return NO_RECALL
    prompt = ids[:, : call.past + call.prompt_rows]
    return recall_lists(prompt.to("cpu", torch.int64), call.past, config)


def _in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention: RoPE leaves fp32 queries beside 16-bit values."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
