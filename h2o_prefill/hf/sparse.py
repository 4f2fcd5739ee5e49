"""The sparse way: one op a layer, and the state that the cache keeps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import NO_RECALL, RecallLists, recall_lists, sparse_attention
from h2o_prefill.hf.eligibility import Call
from h2o_prefill.hf.padding import Padding, Span, is_long_row

NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"

ALL_ROWS = slice(None)

# Softmax scale, sinks and softcap, as the operators take them.
LogitOptions = tuple[float | None, Tensor | None, float]


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
        [B, Tq, Hq, Dv]; 0 where the query is padding.
    """
    padding = call.padding
    options = (scaling, call.sinks, call.softcap)
    if padding is not None:
        return _attend_padded(call, padding, options)
    number = int(call.module.layer_idx)  # type: ignore[arg-type]
    rows, total = call.prompt_rows, call.past + call.prompt_rows
    layer, recall = call.cache_layer, _recall_lists(call, (0, call.key.shape[2]))
    query, key, value = _in_autocast_dtype(call.query, call.key, call.value)
    prompt = query[:, :, :rows]
    if layer is not None and layer.holds(key, value):
        assert call.run is not None
        call.run.keep_state(layer)
        out = layer.attend(prompt, total, recall, number, call.config, *options)
    else:
        state = None if layer is None else layer.state
        config = call.config.of_layer(number)
        out, state = sparse_attention(
            prompt, key[:, :, :total], value[:, :, :total], state, config, recall, *options
        )
        if layer is not None:
            layer.state = state
    return _with_candidates(out, query, key, value, options).transpose(1, 2).contiguous()


def _attend_padded(call: Call, padding: Padding, options: LogitOptions) -> Tensor:
    """Attend in a padded batch: in every row as if it were alone, so that none sees padding.

    The operators take rows of one length, so those that lie in the same place go together. No state
    is kept: its positions would be other tokens in every row.
    """
    number = int(call.module.layer_idx)  # type: ignore[arg-type]
    config = call.config.of_layer(number)
    query, key, value = _in_autocast_dtype(call.query, call.key, call.value)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for (first, end), rows in padding.groups().items():
        q, k, v = (x[:, :, first:end][rows] for x in (query, key, value))
        length = min(end, call.prompt_rows) - first
        if is_long_row(length, call.config):
            recall = _recall_lists(call, (first, end), rows)
            prompt, keys, values = (x[:, :, :length] for x in (q, k, v))
            attended, _ = sparse_attention(prompt, keys, values, None, config, recall, *options)
            attended = _with_candidates(attended, q, k, v, options)
        else:
            attended = ops.dense_attention(q, k, v, *options)
        out[rows, first:end] = attended.transpose(1, 2)
    if call.cache_layer is not None:
        call.cache_layer.padded = True
    return out


def _with_candidates(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: LogitOptions
) -> Tensor:
    """Append the rows of `query` behind those of `out`: they verify candidates.

    They attend as decoded tokens do, and leave no trace in the state.
    """
    rows = out.shape[2]
    if rows == query.shape[2]:
        return out
    return torch.cat([out, ops.dense_attention(query[:, :, rows:], key, value, *options)], dim=2)


def _recall_lists(call: Call, span: Span, rows: slice | list[int] = ALL_ROWS) -> RecallLists:
    """Return the lists of recalled keys on the call's device, made once per forward.

    Parameters
    ----------
    call : Call
    span : (int, int)
        First token and end of the rows.
    rows : slice or list of int
        All rows of the batch that lie there.
    """
    run, config, device = call.run, call.config, call.query.device
    if run is None or config.recall == 0:
        return NO_RECALL
    lists: RecallLists = run.shared(("recall", span), lambda: _find_recalled(call, span, rows))
    moved: RecallLists = run.shared(
        ("recall", span, device),
        lambda: tuple(None if x is None else x.to(device) for x in lists),
    )
    return moved


def _find_recalled(call: Call, span: Span, rows: slice | list[int]) -> RecallLists:
    run, config = call.run, call.config
    assert run is not None
    ids = run.token_ids()
    if ids is None or ids.shape != (call.query.shape[0], call.key.shape[2]):
        run.settings.report(NO_IDS)
        return NO_RECALL
    first, end = span[0], min(span[1], call.past + call.prompt_rows)
    prompt = ids[:, first:end][rows]
    return recall_lists(prompt.to("cpu", torch.int64), call.past, config)


def _in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention: RoPE leaves fp32 queries beside 16-bit values."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
