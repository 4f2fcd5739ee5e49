"""Programs of the C++ classes, valid or with a few wrong arguments, and what must hold of them."""

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_calls.calls import REFUSALS, check_refusal
from random_calls.descriptions import Ints, anything, build, wild_integer, wild_tensor, wild_text
from random_calls.draw import Draw, draw_settings
from random_calls.judge import Judge
from random_calls.operators import Problem, settings_text
from random_calls.twin import Twin
from torch import Tensor

CLASSES = torch.classes.h2o_prefill


@dataclass(frozen=True)
class Object:
    """What stands for an object of the program among the arguments of a step."""

    name: str


@dataclass(frozen=True)
class ChangedState:
    """The state tensors of an object, one of them changed or left out."""

    name: str
    # The tensor that changes, counted round.
    index: int
    # Another tensor in its place, (place, value) to write into it, or None to leave it out.
    change: Any


@dataclass(frozen=True)
class Step:
    """A call of a method, or of a class's constructor or static method."""

    # The object, or the class; an object that a class returns has that name from then on.
    target: str
    # "new" is the constructor; `COPIES` replace the object by a copy.
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """Steps. In a valid program all of them work."""

    steps: tuple[Step, ...]
    valid: bool = False


# Name and type of each argument of a method.
Method = list[tuple[str, str]]


def _methods() -> dict[str, dict[str, Method]]:
    """Return the methods of each class."""
    classes: dict[str, dict[str, Method]] = {}
    for schema in torch._C._jit_get_custom_class_schemas():
        owner, *arguments = schema.arguments or [None]
        if owner is None or ".h2o_prefill." not in str(owner.type):
            continue
        name = schema.name.replace("__init__", "new")
        if not name.startswith("__") and not name.endswith("_getter"):
            methods = classes.setdefault(str(owner.type).split(".")[-1], {})
            methods[name] = [(x.name, str(x.type)) for x in arguments]
    classes = {owner: methods for owner, methods in classes.items() if "new" in methods}
    for methods in classes.values():
        if "state_tensors" in methods:
            methods["from_tensors"] = [("tensors", "List[Tensor]")]
    # Static methods, whose schemas PyTorch does not list.
    classes["PrefillConfig"] |= {"parse": [("fields", "str")], "preset": [("name", "str")]}
    classes["MemorySetTracker"]["for_config"] = [("num_layers", "int"), ("config", "config")]
    return classes


# How a step replaces an object by a copy of it.
COPIES = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
    "state": lambda thing: CLASSES.PrefillContext.from_tensors(thing.state_tensors()),
}
METHODS = _methods()
CONSTRUCTORS = ("new", "from_tensors", "for_config", "parse", "preset")
TEXTS = {"feature_map": ["elu+1", "relu", "identity"], "gqa_reduce": ["sum", "max"]}
# The objects that the steps of a program need before their own.
NEEDS = {
    "ChunkedSparseAttention": (
        ("PrefillConfig", "parse"),
        ("ChunkedKVCache", "new"),
        ("MemorySetTracker", "for_config"),
    )
}
OBJECTS = {"config": "PrefillConfig", "cache": "ChunkedKVCache", "tracker": "MemorySetTracker"}
# Methods that are worth more than others.
OFTEN = ("append", "forward", "update", "init_chunk_scores", "build_memory_set", "with_fields")
QKV = ("xBHTD", "xBGTD", "xBGTE")
TENSORS = dict(zip(("query", "key", "value", "q", "k", "v"), 2 * QKV, strict=True))


class _Steps:
    """Draws steps of one program, whose tensors fit together."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.problem = Problem.drawn(draw, longest=40)
        budgets = ("sink_tokens", "local_window", "heavy_budget")
        self.budgets = {name: draw.integer(0, 6) for name in budgets}

    def step(self, target: str, method: str) -> Step:
        """Draw a step; in one of six an argument is anything."""
        tokens = self.problem.resized(T=self.draw.integer(0, 40))
        types = METHODS[target][method]
        arguments = [self._argument(target, tokens, *x) for x in types]
        # Those that have a default come last.
        arguments = arguments[: self.draw.integer(min(4, len(types)), len(types))]
        if arguments and self.draw.chance(1 / 6):
            arguments[self.draw.integer(0, len(arguments) - 1)] = anything(self.draw)
        return Step(target, method, tuple(arguments))

    def _argument(self, target: str, tokens: Problem, name: str, kind: str) -> Any:
        draw, width = self.draw, sum(self.budgets.values())
        if name in OBJECTS:
            return Object(OBJECTS[name])
        if name == "tensors":
            place = (draw.integer(0, 40), wild_integer(draw))
            change = draw.choice([None, wild_tensor(draw), place])
            return ChangedState(target, draw.integer(0, 9), change)
        if kind.startswith("Optional"):
            return None
        if kind != "Tensor":
            return self._value(name, kind)
        if name == "memory":
            return tokens.positions(30, width)
        if name in ("scores", "colsum"):
            columns = [30] if name == "scores" else [width, draw.integer(0, 30)]
            return tokens.resized(M=draw.choice(columns)).tensor("aBGM", "positive")
        if name in TENSORS and draw.chance(0.9):
            return tokens.tensor(TENSORS[name])
        return wild_tensor(draw)

    def _value(self, name: str, kind: str) -> Any:
        draw = self.draw
        if kind == "bool":
            return draw.chance(0.5)
        if kind == "List[int]":
            return [draw.integer(0, 3) for _ in range(draw.integer(0, 2))]
        if kind == "str":
            text = draw.choice(TEXTS.get(name) or [settings_text(draw, draw_settings(draw, 60, 6))])
            return text if draw.chance(0.8) else wild_text(draw)
        if draw.chance(0.1):
            return wild_integer(draw)
        if name in self.budgets:
            return self.budgets[name]
        least = int(name in ("num_layers", "initial_capacity", "max_capacity", "chunk_size"))
        most = {"layer": 1, "num_layers": 2, "max_tokens": 5000}
        return draw.integer(least, most.get(name, draw.choice([20, 60, 400])))


def draw_program(draw: Draw, name: str) -> Program:
    """Draw a program of a class. Its steps may be refused."""
    steps = _Steps(draw)
    constructor = draw.choice(["parse", "new"]) if name == "PrefillConfig" else "new"
    begin = (*NEEDS.get(name, ()), (name, constructor))
    methods = [(x, method) for x, _ in begin for method in METHODS[x]]
    methods += 3 * [x for x in methods if x[1] in OFTEN]
    program = [steps.step(*x) for x in begin]
    if name == "PrefillContext":
        program = list(draw_context(draw, 60).steps)
    for _ in range(draw.integer(0, 9)):
        place = draw.integer(len(begin), len(program))
        program.insert(place, steps.step(*draw.choice(methods)))
    return Program(tuple(program))


def draw_context(draw: Draw, longest: int = 200) -> Program:
    """Draw a valid program of `PrefillContext`: calls, decoding, truncation and copies."""
    p = Problem.drawn(draw, longest, least=1)
    p = replace(p, dtype=draw.choice(["float32", "bfloat16", "float16"]))
    layers, capacity, length = draw.integer(1, 3), p["T"] + draw.integer(0, 9), 0
    config = draw_settings(draw, p["T"], layers)
    context, scale = "PrefillContext", p.scale()
    steps = [
        Step("PrefillConfig", "parse", (config.to_string(),)),
        Step(context, "new", (layers, capacity, Object("PrefillConfig"))),
    ]
    kinds = ["call", "decode", "truncate", "reset", "copy"]
    for number in range(draw.integer(1, 9)):
        kind = draw.choice(kinds) if number else "call"
        if kind in ("call", "decode"):
            for _ in range(draw.integer(1, 4) if kind == "decode" else 1):
                if length < capacity:
                    new = draw.size(1, capacity - length) if kind == "call" else 1
                    steps += _draw_call(draw, p.resized(T=new), layers, scale)
                    length += new
        elif kind == "truncate":
            # Decoded tokens are often dropped again.
            least = max(0, length - 4) if draw.chance(0.5) else 0
            length = draw.integer(least, length)
            steps.append(Step(context, "truncate", (length,)))
        elif kind == "reset":
            length = 0
            steps.append(Step(context, "reset"))
        else:
            steps.append(Step(context, draw.choice(["pickle", "deepcopy", "state"])))
    return Program(tuple(steps), valid=True)


def _draw_call(draw: Draw, p: Problem, layers: int, scale: float | None) -> list[Step]:
    """Draw a call of all layers."""
    ids = draw.ids(p["B"], p["T"], (0, draw.choice([3, 20, 200]))).view(-1).tolist()
    steps = [Step("PrefillContext", "begin", (Ints(tuple(ids), (p["B"], p["T"]), "int64"),))]
    for layer in range(layers):
        qkv = [p.tensor(spec) for spec in QKV]
        steps.append(Step("PrefillContext", "attend", (layer, *qkv, scale)))
    return steps


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
        before = [] if program.valid else _states(objects)
        try:
            result = _call(objects, step.target, step.method, arguments)
        except REFUSALS as error:
            check_refusal(judge, "valid" if program.valid else "wild", error)
            _check_same(judge, f"after a refused {step.method}", objects, before)
            continue
        if constructs or step.method in COPIES:
            objects[step.target] = result
        if program.valid and twin is None and step.target == "PrefillContext":
            twin = Twin(judge, *arguments)
        elif twin is not None:
            twin.follow(step.method, arguments, result, objects["PrefillContext"])
    if twin is not None:
        twin.check("the last step", objects["PrefillContext"])
    for name, thing in objects.items():
        if not thing._has_method("__getstate__"):
            continue
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
        elif thing._has_method("state_tensors"):
            held += thing.state_tensors()
    return [x.clone() for x in held if x is not None]
