"""Exceptions and interrupts in the middle of a forward: model and cache are as they were."""

from __future__ import annotations

import copy
from typing import Any

from draws import Draw
from judge import Judge
from model_items import Case, check_untouched, draw_case, same_cache, stock_logits
from torch import Tensor
from transformers import DynamicCache

from h2o_prefill import enable


class Injected(RuntimeError):
    """An exception that no library raises by itself."""


def run_failure(draw: Draw, judge: Judge) -> None:
    """Fail inside a second call, compare the cache, and make the call again."""
    case = draw_case(draw, whole=False)
    begin = draw.integer(0, case.length - 1)
    rest = case.ids[:, begin:]
    cache = DynamicCache(config=case.model.config) if draw.chance(0.2) else case.cache()
    kind = draw.choice([Injected, ValueError, KeyboardInterrupt])
    handle = enable(case.model, case.config)
    try:
        if begin:
            case.model(case.ids[:, :begin], past_key_values=cache)
        before = copy.deepcopy(cache)
        expected, called = _forward(case, rest, copy.deepcopy(cache))
        where, after = draw.choice(called), draw.chance(0.5)
        what = f"{case.name}, {kind.__name__} {'after' if after else 'before'} {where}"
        with _raising(case.model.get_submodule(where), kind, after):
            judge.raises(kind, what, lambda: case.model(rest, past_key_values=cache))
        judge.count(f"{kind.__name__} in a forward")
        disabled = draw.chance(0.3)
        if disabled:
            handle.disable()
            judge.finite(f"{what}: without us", stock_logits(case))
        # torch calls no hook on an interrupt: what it left open ends with `disable` or the next
        # forward.
        if disabled or kind is not KeyboardInterrupt:
            same_cache(judge, f"{what}: the cache", cache, before)
        if disabled:
            handle.enable()
        logits = case.model(rest, past_key_values=cache).logits
        judge.same(f"{what}: the call again", logits, expected)
    finally:
        handle.disable()
    check_untouched(judge, case.name, case.model)


def _forward(case: Case, ids: Tensor, cache: Any) -> tuple[Tensor, list[str]]:
    """Return the logits of a call, and the parts of the model that it calls."""
    called: list[str] = []
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, part in case.model.named_modules()
        # The hooks of the model itself end the forward that may be undone.
        if name
    ]
    try:
        return case.model(ids, past_key_values=cache).logits, called
    finally:
        for hook in hooks:
            hook.remove()


def _raising(part: Any, kind: type[BaseException], after: bool) -> Any:
    """Return a handle that removes the hook when its `with` ends."""

    def fail(*_: Any) -> None:
        raise kind("injected")

    return part.register_forward_hook(fail) if after else part.register_forward_pre_hook(fail)
