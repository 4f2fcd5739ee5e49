"""A few seconds of the soak; and that it finds wrong results and leaks that are planted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from random_calls import programs, twin
from soak import soak_run
from soak.memory_watch import MIB
from soak.soak_run import KINDS, SoakRun

import h2o_prefill.hf.layer
from h2o_prefill import ChunkedSparseAttention

SEED = 7
ITEMS = 10
# Not every item of a kind looks at what is planted.
SEARCHED_ITEMS = 60
SHIFT = 0.01


def items_of(kind: str, count: int) -> list[int]:
    """Return the seeds of the first items of a kind that are not of the largest size."""
    seeds = itertools.count(SEED * soak_run.MOST_ITEMS + 1000)
    return list(itertools.islice((x for x in seeds if soak_run.kind_of(x)[0] == kind), count))


def failures_of(kind: str, count: int) -> list[str]:
    """Return what went wrong with items of a kind, up to the first."""
    run = SoakRun(SEED, seconds=0)
    for item in items_of(kind, count):
        run.run_item(item)
        if run.failures:
            break
    return run.failures


def shifted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose result differs in the last element of its last row."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        if getattr(out, "ndim", 0) == 4:
            out[-1, -1, -1, -1] += SHIFT
        return result

    return wrong


@pytest.mark.parametrize("kind", list(KINDS))
def test_items_are_right(kind: str) -> None:
    failures = failures_of(kind, ITEMS)
    assert not failures, failures[0]


@pytest.mark.parametrize(
    ("kind", "place", "name"),
    [
        ("prompts", programs, "_call"),
        ("prompts", twin, "sparse_attention"),
        ("prompts", ChunkedSparseAttention, "attend_"),
        ("model, disturbed", h2o_prefill.hf.layer.ops, "prefill_attention_"),
        ("model, calls", h2o_prefill.hf.layer.ops, "prefill_attention_"),
    ],
)
def test_a_wrong_element_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: Any, name: str
) -> None:
    monkeypatch.setattr(place, name, shifted(getattr(place, name)))
    failures = failures_of(kind, SEARCHED_ITEMS)
    assert failures and "AssertionError" in failures[0]
    assert failures[0].startswith("item ")


def short_run(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, Any], seconds: int) -> SoakRun:
    """Run some kinds of items, timed by a clock of its own."""
    monkeypatch.setattr(soak_run, "fill_caches", lambda: None)
    monkeypatch.setattr(soak_run, "LARGEST_ITEMS", 1)
    monkeypatch.setattr(soak_run, "KINDS", kinds)
    # Each look at the clock is a second, and an item takes three of them.
    run = SoakRun(SEED, seconds, clock=itertools.count().__next__)
    run.run()
    return run


def test_memory_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    run = short_run(monkeypatch, {kind: KINDS[kind] for kind in ("call", "prompts")}, 90)
    assert run.problems() == []
    assert len(run.items) == 2 and run.judge.exceptions


@pytest.mark.parametrize(
    ("quantity", "leaked"),
    [("tensors", torch.empty(0).clone), ("resident", partial(torch.ones, MIB // 4))],
)
def test_a_leak_is_found(
    monkeypatch: pytest.MonkeyPatch, quantity: str, leaked: Callable[[], Any]
) -> None:
    kept: list[Any] = []
    leaking = {"leaking": (1, lambda draw, judge: kept.append(leaked()))}
    run = short_run(monkeypatch, leaking, 240)
    assert any(problem.startswith(f"{quantity} grew by") for problem in run.problems())
