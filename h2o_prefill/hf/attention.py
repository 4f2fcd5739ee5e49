"""The attention function of the name `h2o_prefill`: sparse where allowed, else dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill.hf.call import Attended, Call, as_attention_function
from h2o_prefill.hf.compiled import attend_in_graph
from h2o_prefill.hf.dense import dense_attention
from h2o_prefill.hf.rules import dense_reason
from h2o_prefill.hf.sparse import attend_sparsely
from h2o_prefill.hf.state import call_in_graph


def h2o_prefill_attention(*args: Any, **kwargs: Any) -> Attended:
    """Attend; the arguments are those of `Call.of`, as transformers passes them."""
    forward = call_in_graph()
    if forward is not None:
        call = Call.of(*args, **kwargs)
        # No mask may mean anything, if it was not our mask function that made none.
        if isinstance(call.mask, Tensor) or forward.plain:
            return attend_in_graph(call, forward)
    return _attend(*args, **kwargs)


# Dynamo cannot trace context variables: a compiled model breaks its graph here.
@torch.compiler.disable
@as_attention_function
def _attend(call: Call) -> Attended:
    reason = dense_reason(call)
    if call.context is not None:
        rows = call.query.shape[0] * call.new
        call.enabled.count(getattr(call.module, "layer_idx", None), rows, reason)
    if reason is None:
        return attend_sparsely(call), None
    if reason:
        call.enabled.report(f"dense attention: {reason}")
    return dense_attention(call)
