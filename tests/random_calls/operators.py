"""Valid calls of every operator, as descriptions of their arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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

_PREFILL = (
    "q:xBHTD k:xBGSD v:xBGSE scores:aBG_ memory:iBG_ recall_offsets:i_ recall_positions:iR "
    "recall_visible_from:iR sinks:fH"
)
_LINEAR = "q:xBHTD k:xBGTD v:xBGTE log_decay:aBGT initial_state:aBGDE initial_normalizer:aBGD"
# The tensors of each operator: a letter for the dtype, and one for each size. Sizes of one letter
# are the same, a digit is itself, and _ is any. x is the dtype of the queries, a the one they are
# accumulated in, f any floating-point dtype, i int32 and l int64.
TENSORS = {
    name: {tensor: spec for tensor, spec in (x.split(":") for x in tensors.split())}
    for name, tensors in {
        "accumulate_scores_": "scores:aBG_ memory:iBGM colsum:aBGM",
        "advance_position_": "position:l2",
        "chunked_sparse_attention": _PREFILL,
        "chunkwise_linear_attention": _LINEAR,
        "chunkwise_linear_attention_backward": (
            f"{_LINEAR} grad_out:xBHTE grad_state:aBGDE grad_normalizer:aBGD"
        ),
        "dense_attention": "q:xBHTD k:xBGSD v:xBGSE sinks:fH",
        "gather_rows": "x:xBG__ indices:iBG_",
        "intra_chunk_attention": "q:xBHTD k:xBGTD v:xBGTE",
        "lexical_recall": "token_ids:l__",
        "memory_attention": "q:xBHTD k:xBGSD v:xBGSE indices:iBG_",
        "merge_states": "out_a:xBHTE lse_a:aBHT out_b:xBHTE lse_b:aBHT",
        "prefill_attention": _PREFILL,
        "prefill_attention_": (
            "q:xBHTD k:xBGTD v:xBGTE cache_key:xBGCD cache_value:xBGCE scores:aBG_ memory:iBG_ "
            "position:l2 sinks:fH"
        ),
        "recall_at_position": "token_ids:l__ position:l2",
        "select_memory": "scores:aBG_ memory:iBG_",
    }.items()
}


@dataclass(frozen=True)
class Problem:
    """The sizes of one call by letter, its dtype, and where its choices come from."""

    draw: Draw
    sizes: dict[str, int]
    dtype: str

    @classmethod
    def drawn(cls, draw: Draw, longest: int = 200, least: int = 0, past: bool = True) -> Problem:
        """Draw new tokens T after some earlier ones P, which are S together."""
        tokens, earlier = (
            0 if least == 0 and draw.chance(0.1) else draw.size(max(1, least), longest)
            for least in (least, 0)
        )
        earlier = earlier if past else 0
        heads, kv_heads = draw.choice(HEADS)
        dim = draw.choice(HEAD_DIMS)
        value_dim = draw.choice(HEAD_DIMS) if draw.chance(0.3) else dim
        batch = draw.choice([1, 1, 2, 3])
        while batch > 1 and batch * heads * tokens * dim > MOST_ELEMENTS:
            batch -= 1
        if heads * tokens * dim > MOST_ELEMENTS:
            heads, kv_heads = 2, 1
        return cls(
            draw,
            {"B": batch, "H": heads, "G": kv_heads, "D": dim, "E": value_dim}
            | {"T": tokens, "P": earlier, "S": earlier + tokens},
            draw.choice(DTYPES),
        )

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def resized(self, **sizes: int) -> Problem:
        """Return the problem with other sizes."""
        return replace(self, sizes=self.sizes | sizes)

    @property
    def per_head(self) -> tuple[int, int]:
        """Batch and KV heads."""
        return self["B"], self["G"]

    def tensor(self, spec: str, fill: str = "normal") -> Floats:
        """Return a tensor by a spec as in `TENSORS`."""
        wide = "float64" if self.dtype == "float64" else "float32"
        dtype = {"x": self.dtype, "a": wide, "f": self.draw.choice(DTYPES)}[spec[0]]
        shape = tuple(self.sizes[letter] for letter in spec[1:])
        return Floats(shape, dtype, self.layout(), fill, self.draw.seed())

    def tensors(self, operator: str, names: str) -> Arguments:
        """Return the named tensors of an operator."""
        return {name: self.tensor(TENSORS[operator][name]) for name in names.split()}

    def layout(self) -> str:
        """Return how a tensor lies in memory."""
        return self.draw.choice(LAYOUTS)

    def scale(self) -> float | None:
        """Return a softmax scale."""
        if self.draw.chance(0.5):
            return None
        return self.draw.choice([1, -1]) * self.draw.uniform(0.5, 1.5) * self["D"] ** -0.5

    def logits(self) -> Arguments:
        """Return scale, sinks and soft cap."""
        draw = self.draw
        return {
            "scale": 0.0 if draw.chance(0.1) else self.scale(),
            "sinks": self.tensor("fH") if draw.chance(0.5) else None,
            "softcap": draw.choice([0.0, 0.0, 0.0, 3.0, 50.0, 1e300]),
        }

    def positions(self, most: int, width: int, ascending: bool = True) -> Ints:
        """Return for each KV head different positions below `most`, then -1: int32 [B, Hkv, M]."""
        rows = []
        for _ in range(self["B"] * self["G"]):
            chosen = self.draw.sample(self.draw.integer(0, width), most)
            rows.append(tuple(sorted(chosen) if ascending else chosen))
        return Ints(tuple(rows), (*self.per_head, width), "int32", self.layout())

    def recall(self, block: int) -> Arguments:
        """Return the lists of recalled keys of each block of rows, or None of them."""
        offsets, positions, visible_from = [0], [], []
        for begin in list(range(0, self["T"], block)) * self["B"]:
            last = min(begin + block, self["T"]) - 1
            chosen = self.draw.sample(self.draw.choice([0, self.draw.integer(0, 5)]), self["S"])
            rows = sorted(self["P"] + self.draw.integer(begin, last) for _ in chosen)
            positions += chosen
            visible_from += rows
            offsets.append(len(positions))
        names = ("recall_offsets", "recall_positions", "recall_visible_from")
        if self.draw.chance(0.5):
            return dict.fromkeys(names)
        lists = (offsets, positions, visible_from)
        return {x: Ints(tuple(y), (len(y),)) for x, y in zip(names, lists, strict=True)}

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

    def position(self) -> Ints:
        """Return the tokens so far and where the last chunk began, int64 [2]."""
        begin = self.draw.integer(0, self["P"])
        return Ints((self["P"], begin), (2,), "int64", self.layout())


def settings_text(draw: Draw, config: PrefillConfig) -> str:
    """Write settings as a text, over one of the presets."""
    return f"{draw.choice(['h2o', 'recommended'])},{config.native.to_fields()}"


def _chunk_size(draw: Draw) -> int:
    return INT32_MAX if draw.chance(0.2) else draw.integer(1, 70)


def intra_chunk_attention(draw: Draw) -> Arguments:
    p = Problem.drawn(draw, past=False)
    tensors = p.tensors("intra_chunk_attention", "q k v")
    return {**tensors, "chunk_size": _chunk_size(draw), "scale": p.scale()}


def memory_attention(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    indices = p.positions(p["S"], draw.integer(0, 80), ascending=False)
    return {**p.tensors("memory_attention", "q k v"), "indices": indices, "scale": p.scale()}


def dense_attention(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    return {**p.tensors("dense_attention", "q k v"), **p.logits()}


def merge_states(draw: Draw) -> Arguments:
    return Problem.drawn(draw).tensors("merge_states", "out_a lse_a out_b lse_b")


def select_memory(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    scored = p["S"] if draw.chance(0.5) else draw.integer(0, p["S"] + 5)
    budgets = ("local_window", "heavy_budget", "sink_tokens")
    return {
        "scores": p.resized(M=scored).tensor("aBGM", "positive"),
        "memory": p.positions(p["P"], draw.integer(0, 40)),
        "chunk_begin": p["P"],
        "chunk_end": p["S"],
        **{name: draw.integer(0, draw.choice([5, 60, 400])) for name in budgets},
    }


def accumulate_scores_(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    memory = p.positions(p["S"], draw.integer(0, 40))
    colsum = p.resized(M=memory.shape[2]).tensor("aBGM", "positive")
    return {"scores": p.tensor("aBGS", "positive"), "memory": memory, "colsum": colsum}


def gather_rows(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    width = draw.integer(0, 20)
    rows = [
        tuple(draw.integer(-1, p["S"] - 1) for _ in range(width)) for _ in range(p["B"] * p["G"])
    ]
    return {"x": p.tensor("xBGSD"), "indices": Ints(tuple(rows), (*p.per_head, width))}


def chunked_sparse_attention(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    config = draw_settings(draw, p["S"], layers=6)
    return {
        **p.tensors("chunked_sparse_attention", "q k v"),
        **p.state(),
        **p.recall(config.recall_block),
        "settings": settings_text(draw, config),
        **p.logits(),
    }


def prefill_attention(draw: Draw) -> Arguments:
    arguments = {**chunked_sparse_attention(draw), "layer": draw.integer(0, 3)}
    memory = arguments["memory"]
    if memory is not None:  # a dense call hands it on, in the width of the settings
        arguments["memory"] = Ints((), (*memory.shape[:2], 0))
    return arguments


def prefill_attention_(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    p = p.resized(C=p["S"] + draw.integer(0, 9))
    config, layer = draw_settings(draw, p["S"], layers=4), draw.integer(0, 3)
    position = p.position()
    width = config.of_layer(layer).memory_size
    memory = p.positions(position.values[1], min(width, 150))
    return {
        **p.tensors("prefill_attention_", "q k v cache_key cache_value"),
        "scores": replace(p.tensor("aBGC", "positive"), layout="contiguous"),
        "memory": Ints(memory.values, (*p.per_head, width + draw.integer(0, 9))),
        "position": position,
        **p.recall(config.recall_block),
        "layer": layer,
        "settings": settings_text(draw, config),
        **p.logits(),
    }


def advance_position_(draw: Draw) -> Arguments:
    p = Problem.drawn(draw)
    settings = settings_text(draw, draw_settings(draw, p["S"]))
    return {"position": p.position(), "num_tokens": p["T"], "settings": settings}


def _token_ids(draw: Draw, p: Problem) -> Ints:
    words = draw.choice([1, 3, 20])
    shape = (draw.choice([1, 2, 0]), p["S"])
    values = tuple(draw.integer(0, words - 1) for _ in range(shape[0] * shape[1]))
    return Ints(values, shape, "int64", p.layout())


def lexical_recall(draw: Draw) -> Arguments:
    p = Problem.drawn(draw, longest=100)
    block = draw.integer(1, 24)
    return {
        "token_ids": _token_ids(draw, p),
        "begin": p["P"],
        "chunk_size": block * draw.integer(1, 4),
        "block": block,
        "max_matches": draw.choice([1, 2, 5, 1024]),
        "max_suffix": draw.choice([1, 2, 3, 64]),
        "span": draw.choice([1, 2, 7, 1024]),
        "max_count": draw.choice([1, 2, 16, INT32_MAX]),
    }


def recall_at_position(draw: Draw) -> Arguments:
    p = Problem.drawn(draw, longest=100)
    settings = settings_text(draw, draw_settings(draw, p["S"]))
    return {
        "token_ids": _token_ids(draw, p),
        "position": p.position(),
        "num_tokens": draw.integer(0, p["T"]),
        "settings": settings,
    }


def chunkwise_linear_attention(draw: Draw) -> Arguments:
    p = Problem.drawn(draw, past=False)
    causal, normalize, given = (draw.chance(0.5) for _ in range(3))
    decay = draw.choice([None, "aG", "aBGT"])
    # Products of both signs would let a divisor come near 0.
    maps = ["elu+1", "relu", "identity"][: 1 if normalize else 3]
    return {
        **p.tensors("chunkwise_linear_attention", "q k v"),
        "log_decay": p.tensor(decay, "negative") if decay else None,
        "initial_state": p.tensor("aBGDE") if given and causal else None,
        "initial_normalizer": (
            p.tensor("aBGD", "positive") if given and causal and normalize else None
        ),
        "feature_map": draw.choice(maps),
        "chunk_size": _chunk_size(draw),
        "causal": causal,
        "diagonal_once": not causal and draw.chance(0.5),
        "normalize": normalize,
        "scale": p.scale(),
    }


def chunkwise_linear_attention_backward(draw: Draw) -> Arguments:
    arguments = chunkwise_linear_attention(draw)
    q, k, v = (arguments[name].shape for name in "qkv")
    letters = {"B": q[0], "H": q[1], "T": q[2], "D": q[3], "G": k[1], "E": v[3]}
    p = Problem(draw, letters, arguments["q"].dtype)
    state, normalizer = (draw.chance(0.7) for _ in range(2))
    width = p if arguments["normalize"] else p.resized(D=0)
    return {
        **arguments,
        "grad_out": p.tensor("xBHTE"),
        "grad_state": p.tensor("aBGDE") if state else None,
        "grad_normalizer": width.tensor("aBGD") if normalizer else None,
    }


VALID: dict[str, Callable[[Draw], Arguments]] = {name: globals()[name] for name in TENSORS}
