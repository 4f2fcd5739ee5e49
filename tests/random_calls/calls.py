"""Calls of an operator, valid, broken or wild, and what must hold of them."""

import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from random_calls.broken import breakages
from random_calls.descriptions import anything, build_all
from random_calls.draw import Draw
from random_calls.judge import Judge
from random_calls.operators import Arguments, draw_arguments
from random_calls.oracles import check_result
from torch import Tensor

from h2o_prefill import PrefillConfig

REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, OverflowError)
# A valid call gives what the oracle gives, a broken one is refused with a ValueError, and a wild
# one does either.
KINDS = ("valid", "valid", "broken", "broken", "wild")
# What a refusal names beside arguments.
SUBJECTS = {"preset", "heads", "dims", *(field.name for field in fields(PrefillConfig))}


@dataclass(frozen=True)
class Call:
    """A call of an operator."""

    operator: str
    # By name: numbers, texts, None, and descriptions of tensors.
    arguments: Arguments
    kind: str
    # What a broken call was broken by, and the arguments that were changed.
    breakage: str = ""
    changed: tuple[str, ...] = ()


def draw_call(draw: Draw, operator: str, kinds: tuple[str, ...] = KINDS) -> Call:
    """Draw a call of an operator."""
    # First, because hypothesis varies later choices less.
    kind, place = draw.choice(kinds), draw.integer(0, 9999)
    arguments, what, changed = draw_arguments(draw, operator), "", ()
    if kind == "broken":
        changes = breakages(operator, arguments)
        what = list(changes)[place % len(changes)]
        arguments |= changes[what]
        changed = tuple(changes[what])
    if kind == "wild":
        names = list(arguments)
        for index in draw.sample(draw.integer(1, 3), len(names)):
            arguments[names[index]] = anything(draw)
    return Call(operator, arguments, kind, what, changed)


def check_call(
    call: Call, judge: Judge | None = None, traces: bool = True, device: str = "cpu"
) -> None:
    """Make a call. It must be refused or give the right result, and change nothing else.

    With `traces`, compare its result with what tracing says of it.
    """
    judge = judge or Judge()
    operator = getattr(torch.ops.h2o_prefill, call.operator)
    schema = operator.default._schema.arguments
    arguments = arguments_of(call, device)
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    try:
        result = operator(*arguments)
    except REFUSALS as error:
        check_refusal(judge, call.kind, error)
        if call.changed:
            _check_message(judge, call, [x.name for x in schema], str(error))
        _check_same(judge, arguments, before)
        return
    judge.true(f"accepted although {call.breakage}", call.kind != "broken")
    inputs = [i for i, x in enumerate(schema) if not x.is_write]
    _check_same(judge, [arguments[i] for i in inputs], [before[i] for i in inputs])
    if call.kind == "valid":
        copies = (_on_cpu(arguments), _on_cpu(before))
        results = _on_cpu(result) if isinstance(result, tuple) else _on_cpu([result])[0]
        check_result(judge, call.operator, *copies, results)
        if traces:
            _check_fake(operator, before, result)


def arguments_of(call: Call, device: str = "cpu") -> list[Any]:
    """Build the arguments of a call. Those that are not given have their default, or are None."""
    schema = getattr(torch.ops.h2o_prefill, call.operator).default._schema.arguments
    given = {x.name: call.arguments.get(x.name, x.default_value) for x in schema}
    return list(build_all(given, device).values())


def outcome(call: Call, device: str = "cpu") -> list[Tensor]:
    """Make a call, and return its results and the tensors that it may change."""
    operator, arguments = getattr(torch.ops.h2o_prefill, call.operator), arguments_of(call, device)
    result = operator(*arguments)
    pairs = zip(operator.default._schema.arguments, arguments, strict=True)
    changed = [x for declared, x in pairs if declared.is_write]
    found = [*(result if isinstance(result, tuple) else (result,)), *changed]
    return [x for x in found if isinstance(x, Tensor)]


def _on_cpu(values: Any) -> Any:
    return type(values)(x.cpu() if isinstance(x, Tensor) else x for x in values)


def check_refusal(judge: Judge, kind: str, error: Exception) -> None:
    """Check that a refusal is of the kind that callers expect."""
    message = f"{type(error).__name__}: {error}"
    judge.true(f"refused although valid: {message}", kind != "valid")
    judge.true(message, "INTERNAL ASSERT" not in message)
    judge.true(message, kind != "broken" or type(error) is ValueError)


def _check_message(judge: Judge, call: Call, arguments: list[str], message: str) -> None:
    """Check that a refusal is one line that names what is wrong, and a number that is."""
    subject, must, _ = message.partition(" must ")
    named = set(re.findall(r"\w+", subject))
    judge.true(message, bool(must) and "\n" not in message)
    judge.true(message, bool(named & {*arguments, *SUBJECTS}))
    values = [call.arguments[name] for name in call.changed]
    if [type(x) for x in values] == [int]:
        judge.true(message, f", got {values[0]}" in message or call.changed[0] not in named)


def _check_same(judge: Judge, arguments: list[Any], before: list[Any]) -> None:
    for index, (now, then) in enumerate(zip(arguments, before, strict=True)):
        if isinstance(now, Tensor):
            judge.same(f"argument {index}", now, then)


def _check_fake(operator: Any, arguments: list[Any], result: Any) -> None:
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
