"""What happens before and after a forward that may be compiled, outside of its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.hf.forward_context import ForwardContext
from h2o_prefill.hf.graph_call import MASKED, GraphCall, graph
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import is_unpadded
from h2o_prefill.hf.recall import recall_of
from h2o_prefill.hf.static import StaticPrefillCache


def begin_forward(context: ForwardContext, mask: Any, compiled: bool) -> None:
    """Tell a compiled graph, and the layers of a static cache, what they could not find out."""
    static = isinstance(context.cache, StaticPrefillCache)
    graph.call = graph.layer = None
    if context.tokens is None or not (compiled or static):
        return
    new, config = context.new, context.enabled.config
    position = context.cache.position_for(new) if static else None
    past = context.past if position is None else int(position[0]) if new > 1 else 0
    is_2d = isinstance(mask, Tensor) and mask.ndim == 2
    unpadded = is_2d and (new > 1 or not static) and is_unpadded(mask, past + new)
    if is_2d and not unpadded and not static:
        return  # Rows with padding are attended to one by one, by their lengths.
    if isinstance(mask, Tensor) and not unpadded:
        context.mask_reason = MASKED
    candidates = context.candidates_in(past, new)
    sparse = new > 1 and config.is_sparse_call(past, new - candidates)
    recall = NO_RECALL
    batch, device = context.tokens.shape[0], context.tokens.device
    if sparse:
        tokens, end = (batch, past + new), past + new - candidates
        recall = recall_of(context, tokens, past, (0, past + new), device, end)
    elif static and new > 1 and config.recall:
        # One graph for short calls and long ones.
        recall = _empty_lists(batch, new - candidates, config.recall_block, device)
    for tensor in recall:
        if tensor is not None:  # Every prompt has lists of another length, which may be 0.
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
    hf_config: Any = context.modules[0].config
    context.call = graph.call = GraphCall(
        config=config,
        settings=config.to_string(),
        previous=context.enabled.previous_of(hf_config.get_text_config(decoder=True)),
        sparse=sparse,
        cached=context.cache is not None,
        unpadded=unpadded,
        plain=bool(context.plain),
        candidates=candidates,
        recall=recall,
        position=position,
    )
    if static:
        context.cache.begin(config)


def end_forward(context: ForwardContext, failed: bool) -> None:
    """Store the states that a graph computed, and update counts and reports."""
    call = context.call
    if call is None or context.tokens is None or failed:
        return
    layers = getattr(context.cache, "layers", None) or []
    rows = context.new - call.candidates
    if call.position is not None and any(getattr(layer, "attended", False) for layer in layers):
        ops.advance_position_(call.position, rows, call.settings)
    for layer in layers:
        if isinstance(layer, ChunkedPrefillLayer) and layer.traced is not None:
            layer.take_traced(context.past - call.candidates, rows, call.config)
    for number, reason in call.outcomes:
        if reason is None and not call.is_sparse(number):
            reason = ""
        context.enabled.count(number, context.tokens.shape[0] * context.new, reason)
        if reason and call.sparse:
            context.enabled.report(f"dense attention: {reason}")


def _empty_lists(batch: int, rows: int, block: int, device: torch.device) -> RecallLists:
    """Return the lists of recalled keys, in the form of `ops.lexical_recall`, where none are."""
    offsets, positions, visible_from = (
        torch.zeros(size, dtype=torch.int32, device=device)
        for size in (batch * -(-rows // block) + 1, 0, 0)
    )
    return offsets, positions, visible_from
