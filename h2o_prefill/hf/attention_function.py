"""The attention function of the name `h2o_prefill`: sparse where allowed, else dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.hf.attention_call import Call
from h2o_prefill.hf.dense import dense_attention
from h2o_prefill.hf.eligibility import dense_reason
from h2o_prefill.hf.graph_call import call_in_graph
from h2o_prefill.hf.in_graph import attend_in_graph
from h2o_prefill.hf.sparse import attend_sparsely


def h2o_prefill_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, in the form that transformers calls attention functions in."""
    forward = call_in_graph()
    # No mask may mean anything, if it was not our mask function that made none.
    if forward is not None and (isinstance(attention_mask, Tensor) or forward.plain):
        return attend_in_graph(
            forward, module, query, key, value, attention_mask, dropout, scaling, kwargs
        )
    return _attend(module, query, key, value, attention_mask, dropout, scaling, kwargs)


# Dynamo cannot trace context variables: a compiled model breaks its graph here.
@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    call = Call.of_forward(module, query, key, value, attention_mask, dropout, kwargs)
    reason = dense_reason(call)
    if call.context is not None:
        rows = query.shape[0] * query.shape[2]
        call.enabled.count(getattr(module, "layer_idx", None), rows, reason)
    if reason is None:
        return attend_sparsely(call, scaling), None
    if reason:
        call.enabled.report(f"dense attention: {reason}")
    return dense_attention(call, scaling)
