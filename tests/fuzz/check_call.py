"""What must hold of a fuzzed call of an operator."""

from __future__ import annotations

from typing import Any

import torch
from fuzz.arguments import build
from fuzz.operator_calls import Call
from fuzz.oracles import check_result
from torch import Tensor

REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, OverflowError)


def check_call(call: Call) -> None:
    """Make a call. It must be refused or give the right result, and change nothing else."""
    operator = getattr(torch.ops.h2o_prefill, call.name)
    arguments = build(list(call.arguments))
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    # Memory that nothing wrote holds NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        result = operator(*arguments)
    except REFUSALS as error:
        check_refusal(call.kind, error)
        assert_same(arguments, before)
        return
    assert call.kind != "broken", f"accepted although {call.breakage}"
    schema = operator.default._schema.arguments
    kept = [i for i, x in enumerate(schema[: len(arguments)]) if not x.is_write]
    assert_same([arguments[i] for i in kept], [before[i] for i in kept])
    if call.kind == "valid":
        check_result(call.name, arguments, before, result)
        check_fake(operator, before, result)


def check_refusal(kind: str, error: Exception) -> None:
    """Check that a refusal is of the kind that callers expect."""
    assert kind != "valid", f"refused although valid: {error}"
    assert "INTERNAL ASSERT" not in str(error), error
    if kind == "broken":
        assert type(error) is ValueError, f"{type(error).__name__}: {error}"


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    """Compare arguments to the bit."""
    for x, y in zip(actual, expected, strict=True):
        if isinstance(x, Tensor) and not x.is_sparse and x.device.type != "meta":
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def check_fake(operator: Any, arguments: list[Any], result: Any) -> None:
    """Compare shapes, dtypes and strides with what tracing says."""
    ops = torch.ops.h2o_prefill
    if operator in (ops.lexical_recall, ops.recall_at_position):
        return  # the number of recalled keys is data
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    results, fakes = (x if isinstance(x, tuple) else (x,) for x in (result, fake))
    for x, y in zip(results, fakes, strict=True):
        if isinstance(x, Tensor):
            assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, x.dtype, y)
            strides = [
                (a, b) for n, a, b in zip(x.shape, x.stride(), y.stride(), strict=True) if n > 1
            ]
            assert not x.numel() or all(a == b for a, b in strides), strides
