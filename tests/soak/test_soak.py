"""A few seconds of the soak; and that it finds wrong results and leaks that are planted."""

import itertools
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from random_calls import twin
from soak import soak_run
from soak.soak_run import KINDS, MIB, SoakRun

from h2o_prefill.hf import attention

SEED = 7
ITEMS = 20
# Not every item of a kind looks at what is planted.
SEARCHED_ITEMS = 60


def failures_of(kind, count):
    """Return what went wrong with items of a kind that are not of the largest size, up to one."""
    run = SoakRun(SEED, seconds=0)
    seeds = itertools.count(SEED * soak_run.MOST_ITEMS + 1000)
    for item in itertools.islice((x for x in seeds if soak_run.kind_of(x)[0] == kind), count):
        run.run_item(item)
        if run.failures:
            break
    return run.failures


@pytest.mark.parametrize("kind", ["prompts", "model"])
def test_items_are_right(kind):
    """Calls of operators, the third kind: tests/python/ops/test_operators.py."""
    failures = failures_of(kind, ITEMS)
    assert not failures, failures[0]


@pytest.mark.parametrize(
    ("kind", "place", "name"),
    [("prompts", twin, "sparse_attention"), ("model", attention, "_attend_sparsely")],
)
def test_a_wrong_element_is_found(monkeypatch, kind, place, name):
    call = getattr(place, name)

    def shifted(*args, **kwargs):
        result = call(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        if getattr(out, "ndim", 0) == 4:
            out[-1, -1, -1, -1] += 0.01 * torch.rand(())
        return result

    monkeypatch.setattr(place, name, shifted)
    failures = failures_of(kind, SEARCHED_ITEMS)
    assert failures and "AssertionError" in failures[0]


def problems_of(monkeypatch, kinds, seconds):
    """Run some kinds of items: each look at the clock is a second, and an item takes three."""
    monkeypatch.setattr(soak_run, "LARGEST_ITEMS", 1)
    monkeypatch.setattr(soak_run, "KINDS", kinds)
    return SoakRun(SEED, seconds, clock=itertools.count().__next__).run()


def test_memory_is_flat(monkeypatch):
    kinds = {kind: KINDS[kind] for kind in ("call", "prompts")}
    assert problems_of(monkeypatch, kinds, 60) == []


@pytest.mark.parametrize(
    ("quantity", "leaked"),
    [("tensors", torch.empty(0).clone), ("resident", partial(torch.ones, MIB // 4))],
)
def test_a_leak_is_found(monkeypatch, quantity, leaked):
    kept = []
    leaking = {"leaking": (1, lambda draw, judge: kept.append(leaked()))}
    problems = problems_of(monkeypatch, leaking, 150)
    assert any(problem.startswith(f"{quantity} grew by") for problem in problems)
