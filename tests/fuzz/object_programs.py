"""Programs: a constructor and a few methods of a class, with arguments that are mostly right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuzz.arguments import Floats, Ints, Scores
from fuzz.valid_calls import DTYPES, position_lists, settings_texts
from fuzz.wild_values import anything, integers, tensors, texts
from hypothesis import strategies as st


@dataclass(frozen=True)
class Object:
    """What stands for an object of the program among the arguments of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """A call of a method, or of a class's constructor or static method."""

    # The object, or the class; what a class returns is the object of that name from then on.
    target: str
    # "new" is the constructor.
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ChangedState:
    """The state tensors of an object, one of them changed or left out."""

    name: str
    # The tensor that changes, counted round.
    index: int
    # Another tensor in its place, (place, value) to write into it, or None to leave it out.
    change: Any


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]


layers = st.one_of(st.integers(0, 2), st.integers(0, 1), integers)
tokens = st.one_of(st.integers(0, 40), integers)


@st.composite
def mostly(draw: Any, *strategies: Any) -> tuple[Any, ...]:
    """Arguments as the strategies draw them; in one of six calls one is anything."""
    arguments = [draw(strategy) for strategy in strategies]
    if arguments and draw(st.integers(0, 5)) == 0:
        arguments[draw(st.integers(0, len(arguments) - 1))] = draw(anything)
    return tuple(arguments)


def step(target: str, method: str, *strategies: Any) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.just(target), st.just(method), mostly(*strategies))


def changed_state(target: str) -> st.SearchStrategy[Step]:
    """Build the object from its own state, with a tensor changed, and go on with it."""
    change = st.one_of(st.none(), tensors, st.tuples(st.integers(0, 40), integers))
    state = st.builds(ChangedState, st.just(target), st.integers(0, 9), change)
    return st.builds(Step, st.just(target), st.just("from_tensors"), st.tuples(state))


@dataclass(frozen=True)
class Sizes:
    """What the tensors of a program have in common."""

    batch: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: str


@st.composite
def sizes(draw: Any) -> Sizes:
    small = st.integers(1, 2)
    dims = st.sampled_from([1, 8, 16, 24])
    return Sizes(
        draw(small), draw(small), draw(small), draw(dims), draw(dims), draw(st.sampled_from(DTYPES))
    )


@st.composite
def attention_inputs(draw: Any, s: Sizes, length: int | None = None) -> tuple[Floats, ...]:
    """Query, key and value of new tokens."""
    count = draw(st.integers(0, 40)) if length is None else length
    heads = (s.kv_heads * s.group, s.kv_heads, s.kv_heads)
    return tuple(
        Floats((s.batch, h, count, d), s.dtype, draw(st.sampled_from(["contiguous", "transposed"])))
        for h, d in zip(heads, (s.dim, s.dim, s.value_dim), strict=True)
    )


def programs_of(first: Any, *others: Any) -> st.SearchStrategy[Program]:
    """Return programs that begin with `first` and go on with a few of the others."""
    return st.builds(
        lambda begin, rest: Program((*begin, *rest)),
        first,
        st.lists(st.one_of(*others), max_size=9),
    )


config_texts = st.one_of(settings_texts().map(lambda pair: pair[0]), texts)


@st.composite
def configs(draw: Any) -> Program:
    begin = draw(
        st.one_of(
            step("PrefillConfig", "new", *[integers] * 4),
            step("PrefillConfig", "parse", config_texts),
        )
    )
    small = st.one_of(st.integers(0, 400), integers)
    rest = st.one_of(
        step("PrefillConfig", "preset", texts),
        step("PrefillConfig", "with_fields", config_texts),
        step("PrefillConfig", "to_string"),
        step("PrefillConfig", "to_fields"),
        step("PrefillConfig", "advice"),
        step("PrefillConfig", "memory_size"),
        step("PrefillConfig", "sparse_from"),
        step("PrefillConfig", "of_layer", layers),
        step("PrefillConfig", "is_dense_layer", layers),
        step("PrefillConfig", "is_sparse", layers, small, small),
        step("PrefillConfig", "is_sparse_call", small, small),
        step("PrefillConfig", "is_long_call", small, small),
        step("PrefillConfig", "last_chunk_begin", small, small),
    )
    return Program((begin, *draw(st.lists(rest, max_size=8))))


chunk_managers = programs_of(
    st.tuples(step("ChunkManager", "new", tokens, tokens, tokens)),
    step("ChunkManager", "num_chunks"),
    step("ChunkManager", "begin", tokens),
    step("ChunkManager", "end", tokens),
    step("ChunkManager", "last_chunk_begin"),
)


@st.composite
def caches(draw: Any) -> Program:
    s = draw(sizes())
    capacity = st.one_of(st.integers(1, 60), integers)
    cache = "ChunkedKVCache"
    begin = step(cache, "new", st.integers(1, 2), st.integers(1, 20), capacity)

    def keys_and_values(target: str) -> st.SearchStrategy[Step]:
        return st.builds(
            lambda layer, inputs: Step(target, "append", (layer, *inputs[1:])),
            layers,
            attention_inputs(s),
        )

    return draw(
        programs_of(
            st.tuples(begin),
            keys_and_values(cache),
            keys_and_values(cache),
            step(cache, "append", layers, tensors, tensors),
            *(step(cache, name, layers) for name in ("key", "value", "length", "capacity")),
            step(cache, "truncate", tokens),
            step(cache, "truncate_layer", layers, tokens),
            step(cache, "reset"),
            changed_state(cache),
        )
    )


@st.composite
def trackers(draw: Any) -> Program:
    s = draw(sizes())
    tracker = "MemorySetTracker"
    budgets = [draw(st.integers(0, 6)) for _ in range(3)]
    per_head = (s.batch, s.kv_heads)
    width = sum(budgets)
    begin = st.just(Step(tracker, "new", (2, *budgets)))
    colsums = st.builds(
        lambda n, d: Scores((*per_head, n), d), st.integers(0, 30), st.just("float32")
    )
    scores = st.builds(Scores, st.just((*per_head, 30)))
    sets = position_lists(per_head, 30, ascending=True, most=width).map(
        lambda x: (
            x
            if x.shape[2] == width
            else Ints((-1,) * (s.batch * s.kv_heads * width), (*per_head, width))
        )
    )
    return draw(
        programs_of(
            st.tuples(st.one_of(begin, step(tracker, "new", layers, *[integers] * 3))),
            step(tracker, "init_chunk_scores", layers, tokens, colsums),
            step(tracker, "init_chunk_scores", st.integers(0, 1), st.integers(0, 60), colsums),
            step(tracker, "accumulate_memory_scores", layers, st.just(Scores((*per_head, width)))),
            step(tracker, "build_memory_set", st.integers(0, 1), st.integers(0, 90)),
            step(tracker, "build_memory_set", layers, tokens),
            step(tracker, "update", st.integers(0, 1), scores, sets, st.integers(0, 30)),
            step(tracker, "indices", layers),
            step(tracker, "scores", layers),
            step(tracker, "length", layers),
            step(tracker, "memory_size", layers),
            step(tracker, "truncate", tokens),
            step(tracker, "reset"),
            changed_state(tracker),
        )
    )


@st.composite
def attentions(draw: Any) -> Program:
    s = draw(sizes())
    text, _ = draw(settings_texts())
    config, cache, tracker = (
        Object(x) for x in ("PrefillConfig", "ChunkedKVCache", "MemorySetTracker")
    )
    begin = (
        Step("PrefillConfig", "parse", (text,)),
        Step("ChunkedKVCache", "new", (2, 8, 200)),
        Step("MemorySetTracker", "for_config", (2, config)),
        Step("ChunkedSparseAttention", "new", (config,)),
    )
    forward = st.builds(
        lambda layer, inputs: Step(
            "ChunkedSparseAttention", "forward", (layer, *inputs, cache, tracker)
        ),
        layers,
        attention_inputs(s),
    )
    return draw(
        programs_of(
            st.just(begin),
            forward,
            forward,
            step(
                "ChunkedSparseAttention",
                "forward",
                *(layers, tensors, tensors, tensors, st.just(cache), st.just(tracker)),
            ),
            step("ChunkedKVCache", "truncate", tokens),
            step("MemorySetTracker", "truncate", tokens),
            step("MemorySetTracker", "update", st.integers(0, 1), tensors, tensors, tokens),
            changed_state("ChunkedKVCache"),
            changed_state("MemorySetTracker"),
        )
    )


@st.composite
def contexts(draw: Any) -> Program:
    s = draw(sizes())
    text, _ = draw(settings_texts())
    context = "PrefillContext"
    steps = [
        Step("PrefillConfig", "parse", (text,)),
        Step(context, "new", (2, draw(st.sampled_from([1, 50, 5000])), Object("PrefillConfig"))),
    ]
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.integers(0, 60))
        ids = Ints(tuple(i % 5 for i in range(length)) * s.batch, (s.batch, length), "int64")
        steps.append(Step(context, "begin", draw(mostly(st.just(ids)))))
        for layer in range(2):
            steps.append(Step(context, "attend", (layer, *draw(attention_inputs(s, length)))))
        others = st.one_of(
            step(context, "attend", layers, tensors, tensors, tensors),
            step(context, "begin", tensors),
            step(context, "begin_without_ids", tokens),
            step(context, "truncate", tokens),
            step(context, "length"),
            step(context, "token_ids"),
            step(context, "reset"),
            step(context, "new", layers, tokens, st.just(Object("PrefillConfig"))),
            changed_state(context),
        )
        steps += draw(st.lists(others, max_size=2))
    return Program(tuple(steps))


@st.composite
def linear_sequences(draw: Any) -> Program:
    s = draw(sizes())
    linear = "ChunkwiseLinearAttention"
    feature_map = st.one_of(st.sampled_from(["elu+1", "relu", "identity"]), texts)
    chunk_size = st.one_of(st.integers(1, 20), integers)
    begin = step(linear, "new", feature_map, chunk_size, st.booleans())
    forward = attention_inputs(s).map(lambda inputs: Step(linear, "forward", inputs))
    change = st.one_of(st.none(), tensors, st.tuples(st.integers(0, 40), integers))
    state = st.builds(ChangedState, st.just(linear), st.integers(0, 2), change)
    return draw(
        programs_of(
            st.tuples(begin),
            forward,
            forward,
            step(linear, "forward", tensors, tensors, tensors, tensors),
            step(linear, "length"),
            step(linear, "reset"),
            st.builds(Step, st.just(linear), st.just("load_state_tensors"), st.tuples(state)),
        )
    )


PROGRAMS = {
    "PrefillConfig": configs(),
    "ChunkManager": chunk_managers,
    "ChunkedKVCache": caches(),
    "MemorySetTracker": trackers(),
    "ChunkedSparseAttention": attentions(),
    "PrefillContext": contexts(),
    "ChunkwiseLinearAttention": linear_sequences(),
}
