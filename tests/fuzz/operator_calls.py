"""Calls of an operator: valid, broken or wild."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fuzz.broken_calls import BROKEN
from fuzz.valid_calls import VALID
from fuzz.wild_values import anything
from hypothesis import strategies as st


@dataclass(frozen=True)
class Call:
    """A call of an operator."""

    name: str
    # In the order of its schema: numbers, texts, None, and descriptions of tensors.
    arguments: tuple[Any, ...]
    # A valid call gives what the oracle gives, a broken one is refused with a ValueError, and
    # a wild one does either.
    kind: str
    # What a broken call was broken by.
    breakage: str = ""


def argument_names(name: str) -> list[str]:
    """Return the argument names of an operator's schema."""
    return [a.name for a in getattr(torch.ops.h2o_prefill, name).default._schema.arguments]


@st.composite
def calls(draw: Any, name: str) -> Call:
    """Calls of an operator: two of five valid, two broken, one wild."""
    arguments = draw(VALID[name])
    kind = draw(st.sampled_from(["valid", "valid", "broken", "broken", "wild"]))
    if kind == "broken":
        return draw(broken(name, arguments))
    if kind == "wild":
        changed = list(arguments)
        indices = st.integers(0, len(changed) - 1)
        for index in draw(st.lists(indices, min_size=1, max_size=3, unique=True)):
            changed[index] = draw(anything)
        arguments = tuple(changed)
    return Call(name, arguments, kind)


@st.composite
def broken(draw: Any, name: str, arguments: tuple[Any, ...]) -> Call:
    """The first breakage that applies, from a random one on."""
    named = dict(zip(argument_names(name), arguments, strict=True))
    breakages = list(BROKEN[name].items())
    first = draw(st.integers(0, len(breakages) - 1))
    for what, breakage in breakages[first:] + breakages[:first]:
        changes = breakage(named)
        if changes:
            return Call(name, tuple((named | changes).values()), "broken", what)
    raise AssertionError(f"no breakage applies to {name}{arguments}")
