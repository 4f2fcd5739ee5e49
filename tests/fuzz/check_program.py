"""What must hold of a fuzzed program of the C++ classes."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from fuzz.arguments import build
from fuzz.check_call import REFUSALS, assert_same, check_refusal
from fuzz.object_programs import ChangedState, Object, Program
from torch import Tensor

CLASSES = torch.classes.h2o_prefill
CONSTRUCTORS = ("new", "from_tensors", "for_config", "parse", "preset")


def check_program(program: Program) -> None:
    """Run a program. Each step works or is refused, and a refused one changes no object."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    objects: dict[str, Any] = {}
    for step in program.steps:
        constructs = step.method in CONSTRUCTORS
        if step.target not in objects and not constructs:
            return
        try:
            arguments = [_argument(x, objects) for x in step.arguments]
        except KeyError:
            return  # it needs an object whose constructor was refused
        before = _states(objects)
        owner = getattr(CLASSES, step.target) if constructs else objects[step.target]
        try:
            call = owner if step.method == "new" else getattr(owner, step.method)
            result = call(*arguments)
        except REFUSALS as error:
            check_refusal("wild", error)
            assert_same(_states(objects), before)
        else:
            if constructs:
                objects[step.target] = result
    for thing in objects.values():
        copy = pickle.loads(pickle.dumps(thing))
        assert_same(_states({"": copy}), _states({"": thing}))


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
                flat[place % flat.numel()] = _in_range(value, flat.dtype)
        else:
            tensors[index] = build(argument.change)
        return tensors
    return build(argument)


def _in_range(value: int, dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return value
    limits = torch.iinfo(dtype)
    return max(limits.min, min(value, limits.max))


def _states(objects: dict[str, Any]) -> list[Tensor]:
    """Return what the objects hold. Buffers may have grown; lengths and contents may not."""
    held: list[Tensor] = []
    for thing in objects.values():
        kind = thing._type().name()
        if kind == "PrefillContext":
            held += _states({"": thing.cache(), " ": thing.tracker()})
            ids = thing.token_ids()
            held += [] if ids is None else [ids]
        elif kind == "ChunkedKVCache":
            for layer in range(thing.num_layers()):
                held.append(torch.tensor(thing.length(layer)))
                if thing.length(layer):
                    held += [thing.key(layer).clone(), thing.value(layer).clone()]
        elif kind in ("MemorySetTracker", "ChunkwiseLinearAttention"):
            held += thing.state_tensors()
        elif kind == "PrefillConfig":
            held.append(torch.tensor(list(thing.to_fields().encode())))
    return held
