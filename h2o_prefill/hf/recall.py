"""The lists of recalled keys of a forward, found once for all layers."""

from __future__ import annotations

import torch

from h2o_prefill.functional import NO_RECALL, RecallLists, recall_lists
from h2o_prefill.hf.forward_context import ForwardContext
from h2o_prefill.hf.padding import Span

NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"

ALL_ROWS = slice(None)


def recall_of(
    context: ForwardContext | None,
    tokens: tuple[int, int],
    past: int,
    span: Span,
    device: torch.device,
    end: int,
    rows: slice | list[int] = ALL_ROWS,
) -> RecallLists:
    """Return the lists of recalled keys on a device, made once per forward."""
    if context is None or context.enabled.config.recall == 0:
        return NO_RECALL
    lists: RecallLists = context.shared(
        ("recall", span),
        lambda: _find_recalled(context, tokens, past, (span[0], min(span[1], end)), rows),
    )
    moved: RecallLists = context.shared(
        ("recall", span, device),
        lambda: tuple(None if x is None else x.to(device) for x in lists),
    )
    return moved


def _find_recalled(
    context: ForwardContext, tokens: tuple[int, int], past: int, span: Span, rows: slice | list[int]
) -> RecallLists:
    ids = context.token_ids()
    if ids is None or ids.shape != tokens:
        context.enabled.report(NO_IDS)
        return NO_RECALL
    prompt = ids[:, span[0] : span[1]][rows]
    return recall_lists(prompt.to("cpu", torch.int64), past, context.enabled.config)
