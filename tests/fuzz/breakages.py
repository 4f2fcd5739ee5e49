"""What breaks a documented rule of an argument, whatever the operator.

A breakage takes the arguments of a valid call by name, and returns what to change, or None where
the call has nothing that it could break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fuzz.arguments import Filled, Floats, Ints

Arguments = dict[str, Any]
Breakage = Callable[[Arguments], Arguments | None]
Breakages = dict[str, Breakage]

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def resized(x: Any, dim: int, size: int) -> Any:
    """Change a size of a description; lists of integers become -1 throughout."""
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return Filled(shape, -1, x.dtype) if isinstance(x, Ints) else replace(x, shape=shape)


def grown(name: str, dim: int) -> Breakage:
    """Add one to a size of an argument that is given."""
    return lambda a: a[name] and {name: resized(a[name], dim, a[name].shape[dim] + 1)}


def of_attention() -> Breakages:
    """Queries, keys and values that do not belong together."""

    def heads(**counts: int) -> Breakage:
        return lambda a: {name: resized(a[name], 1, count) for name, count in counts.items()}

    def other_dtype(x: Floats) -> Floats:
        return replace(x, dtype="float32" if x.dtype == "float16" else "float16")

    return {
        "q has three dimensions": lambda a: {"q": replace(a["q"], shape=a["q"].shape[1:])},
        "k has two dimensions": lambda a: {"k": replace(a["k"], shape=a["k"].shape[2:])},
        "v has no dimension": lambda a: {"v": replace(a["v"], shape=())},
        "k has another batch": grown("k", 0),
        "v has no batch": lambda a: {"v": resized(a["v"], 0, 0)},
        "k has another head dim": grown("k", 3),
        "v has other heads": grown("v", 1),
        "v has another length": grown("v", 2),
        "no query heads": heads(q=0),
        "no KV heads": heads(k=0, v=0),
        "no heads": heads(q=0, k=0, v=0),
        "the query heads are no multiple of the KV heads": lambda a: (
            {"q": resized(a["q"], 1, a["q"].shape[1] + 1)} if a["k"].shape[1] > 1 else None
        ),
        "no head dim": lambda a: {x: resized(a[x], 3, 0) for x in ("q", "k")},
        "no value dim": lambda a: {"v": resized(a["v"], 3, 0)},
        "k has another dtype": lambda a: {"k": other_dtype(a["k"])},
        "v has another dtype": lambda a: {"v": other_dtype(a["v"])},
        "all are integers": lambda a: {x: Filled(a[x].shape, 1, "int64") for x in "qkv"},
        "the scale is not a number": lambda a: {"scale": float("nan")},
        "the scale is infinite": lambda a: {"scale": float("-inf")},
    }


def of_logits() -> Breakages:
    """Sinks that are not those of the query heads, and bounds that are none."""
    return {
        "sinks has another size": grown("sinks", 0),
        "sinks has two dimensions": lambda a: {"sinks": Floats((1, *a["q"].shape[1:2]))},
        "sinks is integers": lambda a: {"sinks": Filled(a["q"].shape[1:2], 1, "int64")},
        **of_number("softcap", -1.0, float("inf"), float("nan")),
    }


def of_number(name: str, *values: Any) -> Breakages:
    """An argument with these values."""
    return {f"{name} is {value}": lambda a, value=value: {name: value} for value in values}


def of_lists(name: str, length: Callable[[Arguments], int], ascending: bool = True) -> Breakages:
    """Lists of positions below `length`, int32 [B, Hkv, M], that are none."""

    def with_list(change: Callable[[list[int], Arguments], list[int] | None]) -> Breakage:
        """Change the first list that can be changed so."""

        def break_list(a: Arguments) -> Arguments | None:
            x = a[name]
            if not isinstance(x, Ints) or 0 in x.shape:
                return None
            width = x.shape[2]
            for i in range(0, len(x.values), width):
                changed = change(list(x.values[i : i + width]), a)
                if changed:
                    values = (*x.values[:i], *changed, *x.values[i + width :])
                    return {name: replace(x, values=values)}
            return None

        return break_list

    def first(value: Callable[[Arguments], int]) -> Breakage:
        return with_list(lambda values, a: [value(a), *values[1:]])

    def present(change: Callable[[Any], Any]) -> Breakage:
        return lambda a: {name: change(a[name])} if isinstance(a[name], Ints) else None

    breakages = {
        f"{name} is int64": present(lambda x: replace(x, dtype="int64")),
        f"{name} is floating-point": present(lambda x: replace(x, dtype="float32")),
        f"{name} has two dimensions": present(lambda x: Filled(x.shape[1:], -1)),
        f"{name} has another batch": present(lambda x: resized(x, 0, x.shape[0] + 1)),
        f"{name} has other heads": present(lambda x: resized(x, 1, x.shape[1] + 1)),
        f"{name} holds -5": first(lambda a: -5),
        f"{name} holds the length": first(length),
        f"{name} holds the largest int32": first(lambda a: INT32_MAX),
        f"{name} holds the smallest int32": first(lambda a: -INT32_MAX - 1),
    }
    if not ascending:
        return breakages
    return breakages | {
        f"{name} holds a position behind -1": with_list(
            lambda values, a: [-1, *values[:-1]] if len(values) > 1 and values[0] >= 0 else None
        ),
        f"{name} holds a position twice": with_list(
            lambda values, a: [values[0], *values[:-1]] if values[:-1] and values[0] >= 0 else None
        ),
        f"{name} falls": with_list(
            lambda values, a: (
                [values[1], values[0], *values[2:]] if len(values) > 1 and values[1] >= 0 else None
            )
        ),
    }


def of_recall(length: Callable[[Arguments], int]) -> Breakages:
    """Lists of recalled keys that are not of this call."""
    names = offsets, positions, visible = (
        "recall_offsets",
        "recall_positions",
        "recall_visible_from",
    )

    def put(x: Ints, index: int, value: int) -> Ints:
        values = list(x.values)
        values[index] = value
        return replace(x, values=tuple(values))

    def given(change: Callable[..., Arguments]) -> Breakage:
        return lambda a: None if a[offsets] is None else change(*(a[name] for name in names))

    def any_entry(change: Callable[[Arguments], Arguments]) -> Breakage:
        return lambda a: change(a) if a[positions] and a[positions].values else None

    def two_entries(change: Callable[[Arguments, int], Arguments]) -> Breakage:
        """Change the first block that has two entries; `change` takes the index of the first."""

        def break_block(a: Arguments) -> Arguments | None:
            bounds = a[offsets].values if a[offsets] else ()
            ends = pairwise(bounds)
            begin = next((first for first, end in ends if end - first >= 2), None)
            return None if begin is None else change(a, begin)

        return break_block

    return {
        "one recall list is missing": given(lambda o, p, v: {visible: None}),
        "two recall lists are missing": given(lambda o, p, v: {offsets: None, positions: None}),
        "recall_offsets is too long": given(
            lambda o, p, v: {offsets: Ints((*o.values, o.values[-1]), (len(o.values) + 1,))}
        ),
        "recall_offsets does not begin with 0": given(lambda o, p, v: {offsets: put(o, 0, -1)}),
        "recall_offsets ends behind the lists": given(
            lambda o, p, v: {offsets: put(o, -1, INT32_MAX)}
        ),
        "recall_offsets is int64": given(lambda o, p, v: {offsets: replace(o, dtype="int64")}),
        "recall_positions has two dimensions": given(
            lambda o, p, v: {positions: Filled((1, *p.shape), 0)}
        ),
        "recall_visible_from is too long": given(
            lambda o, p, v: {visible: Filled((len(v.values) + 1,), 0)}
        ),
        "recall_offsets falls": any_entry(
            lambda a: {offsets: put(a[offsets], 0, len(a[positions].values))}
        ),
        "recall_positions holds -1": any_entry(lambda a: {positions: put(a[positions], 0, -1)}),
        "recall_positions holds the length": any_entry(
            lambda a: {positions: put(a[positions], -1, length(a))}
        ),
        "recall_positions holds a position twice": two_entries(
            lambda a, i: {positions: put(a[positions], i + 1, a[positions].values[i])}
        ),
        "recall_visible_from falls": two_entries(
            lambda a, i: {visible: put(a[visible], i, a[visible].values[i + 1] + 1)}
        ),
    }
