"""Valid calls of every operator, as hypothesis strategies of their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fuzz.arguments import LAYOUTS, Floats, Ints, Scores
from hypothesis import strategies as st

HEAD_DIMS = (1, 2, 8, 16, 24, 33, 40, 64, 65, 80, 128)
DTYPES = ("float32", "bfloat16", "float16", "float64")
GQA_REDUCE = ("sum", "max")

lengths = st.one_of(st.integers(0, 12), st.integers(0, 70), st.integers(60, 200))
scales = st.sampled_from([None, None, 0.05, 0.2, 0.0, -0.3])
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 99)


@dataclass(frozen=True)
class Attention:
    """Queries of a call behind `past` others: sizes, and q, k and v of the whole history."""

    batch: int
    kv_heads: int
    past: int
    length: int
    q: Floats
    k: Floats
    v: Floats

    @property
    def total(self) -> int:
        return self.past + self.length

    @property
    def per_head(self) -> tuple[int, int]:
        return self.batch, self.kv_heads

    @property
    def accumulate_dtype(self) -> str:
        return "float64" if self.q.dtype == "float64" else "float32"


@st.composite
def attentions(draw: Any, with_past: bool = True) -> Attention:
    batch, kv_heads, group = draw(
        st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
    )
    dim, value_dim = draw(st.tuples(st.sampled_from(HEAD_DIMS), st.sampled_from(HEAD_DIMS)))
    length, past = draw(lengths), draw(lengths) if with_past else 0
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(seeds)

    def floats(heads: int, tokens: int, width: int, seed: int) -> Floats:
        return Floats((batch, heads, tokens, width), dtype, draw(layouts), "normal", seed)

    return Attention(
        batch,
        kv_heads,
        past,
        length,
        floats(kv_heads * group, length, dim, seed),
        floats(kv_heads, past + length, dim, seed + 100),
        floats(kv_heads, past + length, value_dim, seed + 200),
    )


@st.composite
def logit_options(draw: Any, a: Attention) -> tuple[Any, ...]:
    """Scale, sinks and soft cap."""
    sinks = Floats(a.q.shape[1:2], draw(st.sampled_from(DTYPES)), draw(layouts), seed=draw(seeds))
    softcap = draw(st.sampled_from([0.0, 0.0, 0.0, 3.0, 50.0, 1e300]))
    return draw(scales), sinks if draw(st.booleans()) else None, softcap


@st.composite
def position_lists(
    draw: Any, per_head: tuple[int, int], length: int, ascending: bool, most: int = 40
) -> Ints:
    """int32 [B, Hkv, M]: different positions below `length`, then -1."""
    width = draw(st.integers(0, most))
    values: list[int] = []
    for _ in range(per_head[0] * per_head[1]):
        count = draw(st.integers(0, min(width, length)))
        chosen = draw(
            st.lists(st.integers(0, length - 1), min_size=count, max_size=count, unique=True)
            if count
            else st.just([])
        )
        values += (sorted(chosen) if ascending else chosen) + [-1] * (width - count)
    return Ints(tuple(values), (*per_head, width), "int32", draw(layouts))


@st.composite
def recall_lists(draw: Any, batch: int, past: int, length: int, block: int) -> tuple[Ints, ...]:
    """The three tensors of recalled keys for one call."""
    offsets, positions, visible_from = [0], [], []
    for begin in list(range(0, length, block)) * batch:
        rows = st.integers(past + begin, past + min(begin + block, length) - 1)
        chosen = draw(
            st.lists(st.integers(0, past + length - 1), max_size=5, unique=True)
            if draw(st.booleans())
            else st.just([])
        )
        positions += chosen
        visible_from += sorted(draw(rows) for _ in chosen)
        offsets.append(len(positions))
    return tuple(Ints(tuple(x), (len(x),)) for x in (offsets, positions, visible_from))


@st.composite
def intra_chunk_attention(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions(with_past=False))
    return a.q, a.k, a.v, draw(st.one_of(st.integers(1, 70), st.just(2**31 - 1))), draw(scales)


@st.composite
def memory_attention(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions())
    indices = draw(position_lists(a.per_head, a.total, ascending=False, most=80))
    return a.q, a.k, a.v, indices, draw(scales)


@st.composite
def dense_attention(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions())
    return a.q, a.k, a.v, *draw(logit_options(a))


@st.composite
def merge_states(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions(with_past=False))

    def lse(seed: int) -> Floats:
        return Floats(a.q.shape[:3], a.accumulate_dtype, draw(layouts), "normal", seed)

    out_b = Floats(a.q.shape, a.q.dtype, draw(layouts), "normal", draw(seeds))
    return a.q, lse(draw(seeds)), out_b, lse(draw(seeds))


budgets = st.one_of(st.integers(0, 5), st.integers(0, 60), st.integers(100, 400))


@st.composite
def select_memory(draw: Any) -> tuple[Any, ...]:
    per_head = draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    begin = draw(lengths)
    end = begin + draw(lengths)
    scored = draw(st.one_of(st.just(end), st.integers(0, end + 5)))
    scores = Scores(
        (*per_head, scored),
        draw(st.sampled_from(["float32", "float64"])),
        draw(layouts),
        draw(seeds),
    )
    memory = draw(position_lists(per_head, begin, ascending=True))
    return scores, memory, begin, end, draw(budgets), draw(budgets), draw(budgets)


@st.composite
def accumulate_scores_(draw: Any) -> tuple[Any, ...]:
    per_head = draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    length, dtype = draw(lengths), draw(st.sampled_from(["float32", "float64"]))
    memory = draw(position_lists(per_head, length, ascending=True))
    scores = Scores((*per_head, length), dtype, draw(layouts), draw(seeds))
    return scores, memory, Scores(memory.shape, dtype, draw(layouts), draw(seeds))


@st.composite
def gather_rows(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions(with_past=False))
    width = draw(st.integers(0, 20))
    values = draw(
        st.lists(
            st.integers(-1, a.length - 1),
            min_size=a.batch * a.kv_heads * width,
            max_size=a.batch * a.kv_heads * width,
        )
    )
    return a.k, Ints(tuple(values), (*a.per_head, width), "int32", draw(layouts))


@st.composite
def chunk_and_block(draw: Any) -> tuple[int, int]:
    """A chunk size and the rows of a block that divides it."""
    block = draw(st.integers(1, 24))
    return block * draw(st.integers(1, 4)), block


@st.composite
def states(draw: Any, a: Attention) -> tuple[Any, Any, int]:
    """Scores, memory and the last chunk's begin, as an earlier call left them."""
    if a.past == 0 or not draw(st.booleans()):
        return None, None, 0
    last_chunk_begin = draw(st.integers(0, a.past))
    scored = draw(st.one_of(st.just(a.past), st.integers(last_chunk_begin, a.past)))
    memory = draw(position_lists(a.per_head, last_chunk_begin, ascending=True))
    scores = Scores((*a.per_head, scored), a.accumulate_dtype, draw(layouts), draw(seeds))
    return scores, memory, last_chunk_begin


@st.composite
def chunked_sparse_attention(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions())
    scores, memory, last_chunk_begin = draw(states(a))
    settings, block = draw(settings_texts())
    recall = (
        draw(recall_lists(a.batch, a.past, a.length, block))
        if draw(st.booleans())
        else (None, None, None)
    )
    state = (scores, memory, *recall, last_chunk_begin)
    return (a.q, a.k, a.v, *state, settings, *draw(logit_options(a)))


@st.composite
def settings_texts(draw: Any) -> tuple[str, int]:
    """Settings of a model, and the rows of their recall blocks."""
    chunk, block = draw(chunk_and_block())
    fields = {
        "chunk_size": chunk,
        "local_window": draw(st.integers(0, 20)),
        "heavy_budget": draw(st.integers(0, 20)),
        "sink_tokens": draw(st.integers(0, 5)),
        "dense_tail": draw(st.one_of(st.integers(0, 30), st.just(2**31 - 1))),
        "dense_layers": draw(st.sampled_from(["none", "0", "1+5"])),
        "wide_layers": draw(st.sampled_from(["none", "0", "2+3"])),
        "gqa_reduce": draw(st.sampled_from(GQA_REDUCE)),
        "recall": draw(st.integers(0, 3)),
        "recall_block": block,
        "min_prefill": draw(st.sampled_from(["none", "1", "20"])),
        "block_diagonal": draw(st.sampled_from(["true", "false"])),
    }
    text = ",".join(f"{name}={value}" for name, value in fields.items())
    return f"{draw(st.sampled_from(['h2o', 'recommended']))},{text}", block


@st.composite
def prefill_attention(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions())
    text, block = draw(settings_texts())
    scores, memory, last_chunk_begin = draw(states(a))
    if memory is not None:  # a dense call hands it on, in the width of the settings
        memory = Ints((), (*a.per_head, 0))
    recall = (
        draw(recall_lists(a.batch, a.past, a.length, block))
        if draw(st.booleans())
        else (None, None, None)
    )
    return (
        *(a.q, a.k, a.v, scores, memory, *recall, last_chunk_begin),
        *(draw(st.integers(0, 3)), text, *draw(logit_options(a))),
    )


@st.composite
def prefill_attention_(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions())
    text, block = draw(settings_texts())
    capacity = a.total + draw(st.integers(0, 9))
    new = (a.batch, a.kv_heads, a.length)

    def floats(shape: tuple[int, ...], seed: int) -> Floats:
        return Floats(shape, a.q.dtype, draw(layouts), "normal", seed)

    last_chunk_begin = draw(st.integers(0, a.past))
    memory = draw(position_lists(a.per_head, last_chunk_begin, ascending=True, most=150))
    wide = 165  # K + L + H of the widest settings
    rows = memory.shape[2]
    values = [
        value
        for i in range(a.batch * a.kv_heads)
        for value in memory.values[i * rows : (i + 1) * rows] + (-1,) * wide
    ]
    recall = (
        draw(recall_lists(a.batch, a.past, a.length, block))
        if draw(st.booleans())
        else (None, None, None)
    )
    return (
        a.q,
        floats((*new, a.k.shape[3]), 1),
        floats((*new, a.v.shape[3]), 2),
        floats((*a.per_head, capacity, a.k.shape[3]), 3),
        floats((*a.per_head, capacity, a.v.shape[3]), 4),
        Scores((*a.per_head, capacity), a.accumulate_dtype, "contiguous", 5),
        Ints(tuple(values), (*a.per_head, rows + wide)),
        Ints((a.past, last_chunk_begin), (2,), "int64", draw(layouts)),
        *recall,
        draw(st.integers(0, 3)),
        text,
        *draw(logit_options(a)),
    )


@st.composite
def advance_position_(draw: Any) -> tuple[Any, ...]:
    past = draw(lengths)
    text, _ = draw(settings_texts())
    position = Ints((past, draw(st.integers(0, past))), (2,), "int64", draw(layouts))
    return position, draw(lengths), text


@st.composite
def lexical_recall(draw: Any) -> tuple[Any, ...]:
    batch, length = draw(st.integers(0, 2)), draw(lengths)
    words = draw(st.sampled_from([1, 3, 20]))
    ids = draw(
        st.lists(st.integers(0, words - 1), min_size=batch * length, max_size=batch * length)
    )
    chunk, block = draw(chunk_and_block())
    return (
        Ints(tuple(ids), (batch, length), "int64", draw(layouts)),
        draw(st.integers(0, length)),
        chunk,
        block,
        draw(st.sampled_from([1, 2, 5, 1024])),
        draw(st.sampled_from([1, 2, 3, 64])),
        draw(st.sampled_from([1, 2, 7, 1024])),
        draw(st.sampled_from([1, 2, 16, 2**31 - 1])),
    )


@st.composite
def recall_at_position(draw: Any) -> tuple[Any, ...]:
    ids, past, *_ = draw(lexical_recall())
    text, _ = draw(settings_texts())
    position = Ints((past, draw(st.integers(0, past))), (2,), "int64", draw(layouts))
    return ids, position, draw(st.integers(0, ids.shape[1] - past)), text


@st.composite
def chunkwise_linear_attention(draw: Any) -> tuple[Any, ...]:
    a = draw(attentions(with_past=False))
    causal, normalize, given = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    dtype, dim, value_dim = a.accumulate_dtype, a.k.shape[3], a.v.shape[3]

    def state(*shape: int, fill: str = "normal") -> Floats:
        return Floats(shape, dtype, draw(layouts), fill, draw(seeds))

    decay_shape = draw(st.sampled_from([None, (a.kv_heads,), (*a.per_head, a.length)]))
    # Products of both signs would let a divisor come near 0.
    feature_map = draw(st.sampled_from(["elu+1", "relu", "identity"][: 1 if normalize else 3]))
    return (
        a.q,
        a.k,
        a.v,
        state(*decay_shape, fill="negative") if decay_shape else None,
        state(*a.per_head, dim, value_dim) if given and causal else None,
        state(*a.per_head, dim, fill="positive") if given and causal and normalize else None,
        feature_map,
        draw(st.one_of(st.integers(1, 70), st.just(2**31 - 1))),
        causal,
        not causal and draw(st.booleans()),
        normalize,
        draw(scales),
    )


@st.composite
def chunkwise_linear_attention_backward(draw: Any) -> tuple[Any, ...]:
    *inputs, feature_map, chunk_size, causal, once, normalize, scale = draw(
        chunkwise_linear_attention()
    )
    q, k, v = inputs[:3]
    dtype = "float64" if q.dtype == "float64" else "float32"

    def gradient(*shape: int) -> Floats | None:
        given = Floats(shape, dtype, draw(layouts), "normal", draw(seeds))
        return draw(st.sampled_from([given, given, None]))

    grad_out = Floats((*q.shape[:3], v.shape[3]), q.dtype, draw(layouts), "normal", draw(seeds))
    grad_state = gradient(*k.shape[:2], k.shape[3], v.shape[3])
    grad_normalizer = gradient(*k.shape[:2], k.shape[3] if normalize else 0)
    gradients = (grad_out, grad_state, grad_normalizer)
    return (*inputs, *gradients, feature_map, chunk_size, causal, once, normalize, scale)


VALID = {
    strategy.__name__: strategy()
    for strategy in (
        accumulate_scores_,
        advance_position_,
        chunked_sparse_attention,
        chunkwise_linear_attention,
        chunkwise_linear_attention_backward,
        dense_attention,
        gather_rows,
        intra_chunk_attention,
        lexical_recall,
        memory_attention,
        merge_states,
        prefill_attention,
        prefill_attention_,
        recall_at_position,
        select_memory,
    )
}
