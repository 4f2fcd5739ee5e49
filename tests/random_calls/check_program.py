"""What must hold of a program of the C++ classes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from random_calls.calls import REFUSALS, check_refusal
from random_calls.descriptions import build
from random_calls.judge import Judge
from random_calls.programs import CONSTRUCTORS, ChangedState, Object, Program
from random_calls.twin import Twin
from torch import Tensor

CLASSES = torch.classes.h2o_prefill
# How a step replaces an object by a copy of it.
COPIES = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
    "state": lambda thing: CLASSES.PrefillContext.from_tensors(thing.state_tensors()),
}


def check_program(program: Program, judge: Judge | None = None) -> None:
    """Run a program. Each step works or is refused, and a refused one changes no object.

    A valid program is compared with its `Twin`.
    """
    judge = judge or Judge()
    objects: dict[str, Any] = {}
    twin: Twin | None = None
    for step in program.steps:
        constructs = step.method in CONSTRUCTORS
        if step.target not in objects and not constructs:
            return
        try:
            arguments = [_argument(x, objects) for x in step.arguments]
        except KeyError:
            return  # it needs an object whose constructor was refused
        broken = step.broken and program.valid
        before = _states(objects) if broken or not program.valid else []
        try:
            result = _call(objects, step.target, step.method, arguments)
        except REFUSALS as error:
            kind = "broken" if broken else "valid" if program.valid else "wild"
            check_refusal(judge, kind, error)
            _check_same(judge, f"after a refused {step.method}", objects, before)
            continue
        judge.true(f"{step.method} accepted although broken", not broken)
        if constructs or step.method in COPIES:
            objects[step.target] = result
        if program.valid and twin is None and step.target == "PrefillContext":
            twin = Twin(judge, *arguments)
        elif twin is not None:
            twin.follow(step.method, arguments, result, objects["PrefillContext"])
    if twin is not None:
        twin.check("the last step", objects["PrefillContext"])
    for name, thing in objects.items():
        copied = {name: COPIES["pickle"](thing)}
        _check_same(judge, f"of a copy of {name}", copied, _states({name: thing}))


def _call(objects: dict[str, Any], target: str, method: str, arguments: list[Any]) -> Any:
    if method in COPIES:
        return COPIES[method](objects[target])
    owner = getattr(CLASSES, target) if method in CONSTRUCTORS else objects[target]
    return (owner if method == "new" else getattr(owner, method))(*arguments)


def _argument(argument: Any, objects: dict[str, Any]) -> Any:
    if isinstance(argument, Object):
        return objects[argument.name]
    if isinstance(argument, ChangedState):
        tensors = objects[argument.name].state_tensors()
        index = argument.index % len(tensors)
        if argument.change is None:
            del tensors[index]
        elif isinstance(argument.change, tuple):
            place, value = argument.change
            flat = tensors[index].view(-1)
            if flat.numel():
                flat[place % flat.numel()] = torch.tensor(value).to(flat.dtype)
        else:
            tensors[index] = build(argument.change)
        return tensors
    return build(argument)


def _check_same(judge: Judge, what: str, objects: dict[str, Any], before: list[Tensor]) -> None:
    states = _states(objects)
    judge.true(f"objects {what}", len(states) == len(before))
    for index, (now, then) in enumerate(zip(states, before, strict=True)):
        judge.same(f"state {index} {what}", now, then)


def _states(objects: dict[str, Any]) -> list[Tensor]:
    """Return what the objects hold. Buffers may have grown; lengths and contents may not."""
    held: list[Any] = []
    for thing in objects.values():
        kind = thing._type().name()
        if kind == "PrefillContext":
            held += [*_states({"": thing.cache(), " ": thing.tracker()}), thing.token_ids()]
        elif kind == "ChunkedKVCache":
            for layer in range(thing.num_layers()):
                held.append(torch.tensor(thing.length(layer)))
                if thing.length(layer):
                    held += [thing.key(layer), thing.value(layer)]
        elif kind == "PrefillConfig":
            held.append(torch.tensor(list(thing.to_fields().encode())))
        elif kind not in ("ChunkManager", "ChunkedSparseAttention"):
            held += thing.state_tensors()
    return [x.clone() for x in held if x is not None]
