"""Valid calls of every operator, as descriptions of their arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from random_calls.descriptions import LAYOUTS, Floats, Ints
from random_calls.draw import Draw, draw_settings

from h2o_prefill import PrefillConfig

Arguments = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")
HEADS = ((1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (9, 3), (8, 2), (4, 1), (7, 1))
HEAD_DIMS = (1, 2, 8, 16, 20, 24, 32, 33, 40, 64, 65, 80, 96, 128)
# Elements of the queries of a layer; long prompts have few heads.
MOST_ELEMENTS = 1 << 20
INT32_MAX = 2**31 - 1
RECALL = ("recall_offsets", "recall_positions", "recall_visible_from")
# tests/python/core/test_layer_state.py has calls that leave them.
CHECKPOINTS = ("checkpoint_memory", "checkpoint_scores", "checkpoint_errors")

_LINEAR = "q:xBHTD k:xBGTD v:xBGTE log_decay:aBGT initial_state:aBGDE initial_normalizer:aBGD"
# The tensors of each operator: a letter for the dtype, and one for each size. Sizes of one letter
# are the same, a digit is itself, and _ is any. x is the dtype of the queries, a the one they are
# accumulated in, f any floating-point dtype, s float32, i int32, l int64, t i or l, w packed ones.
TENSORS = {
    name: {tensor: spec for tensor, spec in (x.split(":") for x in tensors.split())}
    for name, tensors in {
        "accumulate_scores_": "scores:aBG_ memory:iBGM colsum:aBGM",
        "advance_position_": "position:l2",
        "chunked_sparse_attention": (
            "q:xBHTD k:xBGSD v:xBGSE scores:aBG_ memory:iBG_ recall_offsets:i_ recall_positions:iR "
            "recall_visible_from:iR sinks:fH errors:sBG4"
        ),
        "chunkwise_linear_attention": _LINEAR,
        "chunkwise_linear_attention_backward": (
            f"{_LINEAR} grad_out:xBHTE grad_state:aBGDE grad_normalizer:aBGD"
        ),
        "dense_attention": "q:xBHTD k:xBGSD v:xBGSE sinks:fH",
        "gather_rows": "x:xBG__ indices:iBG_",
        "intra_chunk_attention": "q:xBHTD k:xBGTD v:xBGTE",
        "lexical_recall": "token_ids:l__ token_text:i__",
        "linear": "packed:w___ scales:s_ bias:f_",  # x, and the ids of an embedding, have any sizes
        "memory_attention": "q:xBHTD k:xBGSD v:xBGSE indices:iBG_",
        "pack_linear": "weight:x__",
        "packed_embedding": "packed:w___ scales:s_",
        "merge_states": "out_a:xBHTE lse_a:aBHT out_b:xBHTE lse_b:aBHT",
        "paged_sparse_attention_": (
            "q:x1HTD key_pages:xNGZD value_pages:xNGZE page_table:t_ out:x1HTE memory:i1GM "
            "scores:a1GM errors:s1G4"
        ),
        "prefill_attention_": (
            "q:xBHTD k:xBGTD v:xBGTE cache_key:xBGCD cache_value:xBGCE scores:aBG_ memory:iBG_ "
            "position:l2 sinks:fH errors:sBG4 checkpoint_memory:iNBGM checkpoint_scores:aNBGM "
            "checkpoint_errors:sNBG4"
        ),
        "recall_at_position": "token_ids:l__ token_text:i__ position:l2",
        "select_memory": "scores:aBG_ memory:iBG_",
        "sliding_window_attention": "q:xBHTD k:xBGSD v:xBGSE sinks:fH",
    }.items()
}


@dataclass(frozen=True)
class Problem:
    """The sizes of one call by letter, its dtype, and where its choices come from."""

    draw: Draw
    sizes: dict[str, int]
    dtype: str
    # One of `LAYOUTS` for all tensors, fields of the settings, and whole arguments; else drawn.
    layout: str | None = None
    settings: dict[str, Any] | None = None
    fixed: Arguments = field(default_factory=dict)

    @classmethod
    def drawn(cls, draw: Draw, longest: int = 200, least: int = 0) -> Problem:
        """Draw new tokens T after some earlier ones P, which are S together."""
        tokens, earlier = (
            0 if least == 0 and draw.chance(0.1) else draw.size(1, longest) for least in (least, 0)
        )
        heads, kv_heads = draw.choice(HEADS)
        dim = draw.choice(HEAD_DIMS)
        value_dim = draw.choice(HEAD_DIMS) if draw.chance(0.3) else dim
        batch = draw.choice([1, 1, 2, 3])
        while batch > 1 and batch * heads * tokens * dim > MOST_ELEMENTS:
            batch -= 1
        if heads * tokens * dim > MOST_ELEMENTS:
            heads, kv_heads = 2, 1
        sizes = {"B": batch, "H": heads, "G": kv_heads, "D": dim, "E": value_dim}
        sizes |= {"T": tokens, "P": earlier, "S": earlier + tokens}
        return cls(draw, sizes, draw.choice(DTYPES))

    @cached_property
    def config(self) -> PrefillConfig:
        """Settings of the call."""
        if self.settings is not None:
            return PrefillConfig(**self.settings)
        return draw_settings(self.draw, self["S"], layers=4)

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def resized(self, **sizes: int) -> Problem:
        """Return the problem with other sizes."""
        return replace(self, sizes=self.sizes | sizes)

    def like(self, sizes: dict[str, int], **changes: Any) -> Problem:
        """Return the problem with the sizes, and the other changes, of an example."""
        sizes = self.sizes | sizes
        return replace(self, sizes=sizes | {"S": sizes["P"] + sizes["T"]}, **changes)

    def lie(self) -> str:
        """Return how a tensor lies in memory."""
        return self.layout or self.draw.choice(LAYOUTS)

    @property
    def per_head(self) -> tuple[int, int]:
        """Batch and KV heads."""
        return self["B"], self["G"]

    def tensor(self, spec: str, fill: str = "normal") -> Floats:
        """Return a tensor by a spec as in `TENSORS`."""
        wide = "float64" if self.dtype == "float64" else "float32"
        dtype = {"x": self.dtype, "a": wide, "f": self.draw.choice(DTYPES)}[spec[0]]
        shape = tuple(self.sizes[letter] for letter in spec[1:])
        return Floats(shape, dtype, self.lie(), fill, self.draw.seed())

    def scale(self) -> float | None:
        """Return a softmax scale."""
        if self.draw.chance(0.5):
            return None
        return self.draw.choice([1, -1]) * self.draw.uniform(0.5, 1.5) * self["D"] ** -0.5

    def positions(self, most: int, width: int, ascending: bool = True) -> Ints:
        """Return for each KV head different positions below `most`, then -1: int32 [B, Hkv, M]."""
        rows = []
        for _ in range(self["B"] * self["G"]):
            chosen = self.draw.sample(self.draw.integer(0, width), most)
            rows.append(tuple(sorted(chosen) if ascending else chosen))
        return Ints(tuple(rows), (*self.per_head, width), "int32", self.lie())

    def recall(self) -> Arguments:
        """Return the lists of recalled keys of each block of rows, or None of them."""
        block = self.config.recall_block
        offsets, positions, visible_from = [0], [], []
        for begin in list(range(0, self["T"], block)) * self["B"]:
            last = min(begin + block, self["T"]) - 1
            few = self.draw.choice([0, self.draw.integer(0, 5)])
            chosen = self.draw.sample(9 if self.settings else few, self["S"])
            rows = sorted(self["P"] + self.draw.integer(begin, last) for _ in chosen)
            positions += chosen
            visible_from += rows
            offsets.append(len(positions))
        if not self.settings["recall"] if self.settings else self.draw.chance(0.5):
            return dict.fromkeys(RECALL)
        lists = (offsets, positions, visible_from)
        return {x: Ints(tuple(y), (len(y),)) for x, y in zip(RECALL, lists, strict=True)}

    def state(self) -> Arguments:
        """Return scores, memory and the last chunk's begin, as an earlier call left them."""
        draw, past = self.draw, self["P"]
        if past == 0 or not draw.chance(0.7):
            return {"scores": None, "memory": None, "last_chunk_begin": 0}
        begin = draw.integer(0, past)
        scored = past if draw.chance(0.5) else draw.integer(begin, past)
        return {
            "scores": self.resized(M=scored).tensor("aBGM", "positive"),
            "memory": self.positions(begin, draw.integer(0, 40)),
            "last_chunk_begin": begin,
        }

    def errors(self) -> Ints:
        """Return the errors of each head so far, float32 [B, Hkv, 4]."""
        draw, values = self.draw, []
        for _ in range(self["B"] * self["G"]):
            chunks = draw.choice([0, 0, 1, 2, 7])
            values += [draw.integer(0, 6), draw.integer(0, 9), chunks, chunks * draw.integer(1, 64)]
        return Ints(tuple(values), (*self.per_head, 4), "float32")

    def position(self) -> Ints:
        """Return the tokens so far and where the last chunk began, int64 [2]."""
        begin = self.draw.integer(0, self["P"])
        return Ints((self["P"], begin), (2,), "int64", self.lie())


def settings_text(draw: Draw, config: PrefillConfig) -> str:
    """Write settings as a text, over one of the presets."""
    return f"{draw.choice(['h2o', 'recommended'])},{config.native.to_fields()}"


def draw_arguments(draw: Draw, operator: str, **example: Any) -> Arguments:
    """Draw the arguments of a valid call; `example` has what of a `Problem` is not drawn."""
    p = Problem.drawn(draw, 100 if "token_ids" in TENSORS[operator] else 200)
    if example:
        p = p.like(**example)
    given = GROUPS[operator](p) if operator in GROUPS else {}
    arguments: Arguments = {}
    for argument in getattr(torch.ops.h2o_prefill, operator).default._schema.arguments:
        name = argument.name
        if name in p.fixed:
            arguments[name] = p.fixed[name]
        elif name in given:
            arguments[name] = given[name]
        elif name in VALUES:
            arguments[name] = VALUES[name](p)
        else:
            arguments[name] = p.tensor(TENSORS[operator][name])
    return arguments


def _prefill_in_place(p: Problem) -> Arguments:
    position, layer = p.position(), p.fixed.get("layer", p.draw.integer(0, 3))
    width = p.config.of_layer(layer).memory_size
    # What another prompt left, where this is the first call.
    memory = p.positions(position.values[1] if p["P"] else 40, min(width, 150))
    buffers = p.resized(C=p["S"] + p.draw.integer(0, 9))
    in_buffers = p.settings is None and p.draw.chance(0.3)
    rows = p["S"] if in_buffers else p["P"]
    return {
        **({"k": None, "v": None} if in_buffers else {}),
        "cache_key": replace(buffers.tensor("xBGCD"), rows=rows),
        "cache_value": replace(buffers.tensor("xBGCE"), rows=rows),
        "scores": replace(buffers.tensor("aBGC", "positive"), layout="contiguous"),
        "memory": Ints(memory.values, (*p.per_head, width + p.draw.integer(0, 9))),
        "position": position,
        "layer": layer,
        "errors": p.errors() if p.config.error_rows or p.draw.chance(0.5) else None,
        "window": VALUES["window"](p) if p.draw.chance(0.3) else None,
        **p.recall(),
        **dict.fromkeys(CHECKPOINTS),
    }


def _paged(p: Problem) -> Arguments:
    p = p.resized(B=1)
    size, count = p.draw.choice([1, 16, 48]), p.draw.integer(1, 3)
    used = -(-p["S"] // size)
    pages = p.resized(N=used + count, Z=size)
    state: Arguments = dict.fromkeys(("memory", "scores", "errors"))
    if p["P"] and "errors" not in p.fixed and p.draw.chance(0.7):
        memory = p.positions(p["P"], p.draw.integer(0, 40))
        scores = p.resized(M=memory.shape[2]).tensor("aBGM", "positive")
        state = {"memory": memory, "scores": scores, "errors": p.errors()}
    table = tuple(p.draw.sample(used, pages["N"]))
    return {
        "q": p.tensor("xBHTD"),
        "key_pages": pages.tensor("xNGZD"),
        "value_pages": pages.tensor("xNGZE"),
        "page_table": Ints(table, (used,), p.draw.choice(["int32", "int64"])),
        "total": p["S"],
        "out": p.tensor("xBHTE"),
        **state,
        **p.recall(),
        "settings": settings_text(p.draw, p.config),
        "checkpoints": p.draw.integer(0, -(-p["T"] // p.config.chunk_size)),
    }


def _select_memory(p: Problem) -> Arguments:
    scored = p["S"] if p.draw.chance(0.5) else p.draw.integer(0, p["S"] + 5)
    fill = p.draw.choice(["positive", "ties", "nan", "inf", "-inf"])
    scores = p.resized(M=scored).tensor("aBGM", fill)
    return {"scores": scores, "memory": p.positions(p["P"], p.draw.integer(0, 40))}


def _accumulate_scores(p: Problem) -> Arguments:
    memory = p.positions(p["S"], p.draw.integer(0, 40))
    colsum = p.resized(M=memory.shape[2]).tensor("aBGM", "positive")
    return {"scores": p.tensor("aBGS", "positive"), "memory": memory, "colsum": colsum}


def _gather_rows(p: Problem) -> Arguments:
    width, rows = p.draw.integer(0, 20), range(p["B"] * p["G"])
    values = [tuple(p.draw.integer(-1, p["S"] - 1) for _ in range(width)) for _ in rows]
    return {"x": p.tensor("xBGSD"), "indices": Ints(tuple(values), (*p.per_head, width))}


def _packed(p: Problem) -> Arguments:
    """Return packed weights, any numbers, of 2 D to 18 D inputs and E to 9 E outputs."""
    inputs, outputs = (p[x] * p.draw.choice([1, 3, 9]) for x in "DE")
    inputs *= 2
    dtype = p.fixed.get("format", p.draw.choice(["bfloat16", "float16", "int8"]))
    shape = -(-outputs // 16), inputs, 16
    fill, layout = "bytes" if dtype == "int8" else "normal", p.draw.choice(["contiguous", "offset"])
    return {
        "packed": Floats(shape, dtype, layout, fill, p.draw.seed()),
        "scales": Floats((outputs if dtype == "int8" else 0,), fill="positive"),
        "outputs": outputs,
    }


def _linear_layer(p: Problem) -> Arguments:
    packed = _packed(p)
    sized = p.resized(I=packed["packed"].shape[1], O=packed["outputs"])
    x = sized.tensor(p.draw.choice(["xBTI", "xTI", "xTI", "xI"]))
    return {**packed, "x": x, "bias": sized.tensor("fO") if p.draw.chance(0.5) else None}


def _packed_embedding(p: Problem) -> Arguments:
    packed = _packed(p)
    rows = tuple(p.draw.integer(0, packed["outputs"] - 1) for _ in range(p["B"] * p["T"]))
    return {**packed, "ids": Ints(rows, (p["B"], p["T"]), "int64", p.lie())}


def _token_text(p: Problem) -> Ints | None:
    """Draw the characters of some of the tokens."""
    if p.draw.chance(0.4):
        return None
    rows, width = p.draw.integer(0, 9), p.draw.integer(0, 4)
    values = [tuple(p.draw.integer(0, 3) for _ in range(width)) for _ in range(rows)]
    return Ints(tuple(values), (rows, width))


def _linear(p: Problem) -> Arguments:
    draw = p.draw
    causal, normalize, given = (draw.chance(0.5) for _ in range(3))
    decay, state = draw.choice([None, "aG", "aBGT"]), given and causal
    normalizer = p if normalize else p.resized(D=0)
    return {
        "log_decay": p.tensor(decay, "negative") if decay else None,
        "initial_state": p.tensor("aBGDE") if state else None,
        "initial_normalizer": p.tensor("aBGD", "positive") if state and normalize else None,
        "grad_state": p.tensor("aBGDE") if draw.chance(0.7) else None,
        "grad_normalizer": normalizer.tensor("aBGD") if draw.chance(0.7) else None,
        # Products of both signs would let a divisor come near 0.
        "feature_map": draw.choice(["elu+1", "relu", "identity"][: 1 if normalize else 3]),
        "causal": causal,
        "normalize": normalize,
    }


def _token_ids(p: Problem) -> Ints:
    words, batch = p.draw.choice([1, 3, 20]), p.draw.choice([1, 2, 0])
    values = tuple(p.draw.integer(0, words - 1) for _ in range(batch * p["S"]))
    return Ints(values, (batch, p["S"]), "int64", p.lie())


def _budget(p: Problem) -> int:
    return p.draw.integer(0, p.draw.choice([5, 60, 400]))


# Arguments by name, where an operator says nothing else.
VALUES: dict[str, Callable[[Problem], Any]] = {
    "begin": lambda p: p["P"],
    "chunk_begin": lambda p: p["P"],
    "chunk_end": lambda p: p["S"],
    "chunk_size": lambda p: INT32_MAX if p.draw.chance(0.2) else p.draw.integer(1, 70),
    "heavy_budget": _budget,
    "layer": lambda p: p.draw.integer(0, 3),
    "local_window": _budget,
    "num_tokens": lambda p: p["T"],
    "position": Problem.position,
    "scale": lambda p: 0.0 if p.draw.chance(0.1) else p.scale(),
    "settings": lambda p: settings_text(p.draw, p.config),
    "sink_tokens": _budget,
    "sinks": lambda p: p.tensor("fH") if p.draw.chance(0.5) else None,
    "softcap": lambda p: p.draw.choice([0.0, 0.0, 0.0, 3.0, 50.0, 1e300]),
    "token_ids": _token_ids,
    "token_text": _token_text,
    "format": lambda p: p.draw.choice(["bfloat16", "float16", "int8"]),
    "errors": lambda p: p.errors() if p.draw.chance(0.5) else None,
    "window": lambda p: (
        INT32_MAX if p.draw.chance(0.2) else p.draw.integer(1, p.draw.choice([9, 250]))
    ),
}
# Arguments that depend on each other.
GROUPS: dict[str, Callable[[Problem], Arguments]] = {
    "accumulate_scores_": _accumulate_scores,
    "chunked_sparse_attention": lambda p: {**p.state(), **p.recall()},
    "chunkwise_linear_attention": _linear,
    "chunkwise_linear_attention_backward": _linear,
    "gather_rows": _gather_rows,
    "lexical_recall": lambda p: {
        "settings": settings_text(p.draw, p.config.replace(recall=max(p.config.recall, 1)))
    },
    "linear": _linear_layer,
    "pack_linear": lambda p: {"weight": p.resized(D=2 * p["D"]).tensor("xED")},
    "packed_embedding": _packed_embedding,
    "memory_attention": lambda p: {"indices": p.positions(p["S"], p.draw.integer(0, 80), False)},
    "paged_sparse_attention_": _paged,
    "prefill_attention_": _prefill_in_place,
    "recall_at_position": lambda p: {"num_tokens": p.draw.integer(0, p["T"])},
    "select_memory": _select_memory,
}
