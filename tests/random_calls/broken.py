"""What an operator must refuse with a ValueError, whichever valid call it breaks.

Each function takes the arguments of a valid call by name and returns what to change: the change of
the arguments by what it breaks.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from random_calls.descriptions import Floats, Ints
from random_calls.operators import INT32_MAX, RECALL, TENSORS, Arguments

Changes = dict[str, Arguments]

INT64_MAX = 2**63 - 1

# Values that an argument of this name never has.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "begin": (-1, INT64_MAX),
    "block": (0, -1, INT64_MAX),
    "checkpoints": (-1, INT64_MAX),
    "chunk_begin": (-1, INT64_MAX),
    "chunk_end": (-1, 2**31, INT64_MAX),
    "chunk_size": (0, -1, -INT64_MAX - 1),
    "feature_map": ("", "elu", "softmax"),
    "format": ("", "int4", "float32"),
    "outputs": (0, -1, INT64_MAX),
    "heavy_budget": (-1, INT32_MAX, INT64_MAX),
    "last_chunk_begin": (-1, INT64_MAX),
    "layer": (-1, -INT64_MAX - 1),
    "local_window": (-1, 2**22 + 1, INT64_MAX),
    "max_count": (0, -1),
    "max_matches": (0, 1025, INT64_MAX),
    "max_suffix": (0, 65, INT64_MAX),
    "num_tokens": (-1, INT64_MAX, -INT64_MAX - 1),
    "position": (Ints((-1, 0), (2,), "int64"),),
    "scale": (float("nan"), float("-inf")),
    "settings": (
        "",
        "unknown",
        "h2o,chunk_size=0",
        "h2o,chunk_size",
        "h2o,local_window=-1",
        "h2o,dense_tail=-1",
        "h2o,heavy_budget=99999999999999999999",
        "h2o,gqa_reduce=mean",
        "h2o,recall=1025",
        "h2o,recall_characters=65",
        "h2o,error_rows=257",
        "h2o,error_threshold=nan",
        "h2o,error_rows=1,max_widen=65",
    ),
    "sink_tokens": (-1, -INT64_MAX - 1, INT64_MAX),
    "softcap": (-1.0, float("inf"), float("nan")),
    "span": (0, 1025, INT64_MAX),
    "total": (-1, INT64_MAX),
    "window": (0, -1, -INT64_MAX - 1),
}


# What a tensor of each kind of `TENSORS` must not be; in capitals, where it is the only one.
OTHER_DTYPES = {
    **{
        "w": ("int64", "float32", "float64"),
        "i": ("int64", "float32"),
        "l": ("int32",),
        "t": ("float32",),
        "f": ("int64",),
        "s": ("int64", "float64"),
    },
    **{"x": ("int64", "float32", "float16"), "a": ("float16", "bfloat16", "float32", "float64")},
    **{"X": ("int64",), "A": ("float16", "bfloat16")},
}


def breakages(operator: str, a: Arguments) -> Changes:
    """Return everything that breaks a valid call."""
    changes: Changes = {}
    for name in a.keys() & NUMBERS.keys():
        changes |= {f"{name} is {value}": {name: value} for value in NUMBERS[name]}
    changes |= _kinds(operator, a) | _tensors(TENSORS[operator], a)
    changes |= OTHERS.get(operator, lambda a: {})(a)
    return dict(sorted(changes.items()))


def changed(x: Any, **fields: Any) -> Any:
    """Change shape or dtype of a description; integers of another shape are -1 throughout."""
    if isinstance(x, Ints) and "shape" in fields:
        return Ints(-1, fields["shape"], x.dtype)
    return Ints(1, x.shape, "int64") if fields.get("dtype") == "int64" else replace(x, **fields)


def resized(x: Any, dim: int, size: int) -> Any:
    """Change a size of a description."""
    return changed(x, shape=(*x.shape[:dim], size, *x.shape[dim + 1 :]))


# Without a tensor, and of sparse ones here, PyTorch itself says what is wrong.
PYTORCHS = ("token_ids", "token_text", "weight")


def _kinds(operator: str, a: Arguments) -> Changes:
    """Break what any tensor must be: there, strided, and written at no place twice."""
    schema = getattr(torch.ops.h2o_prefill, operator).default._schema.arguments
    changes: Changes = {}
    # A decoded token trusts the buffers of its prompt.
    decodes = operator == "prefill_attention_" and a["q"].shape[2] < 2 and a["position"].values[0]
    for x in schema:
        tensor = a.get(x.name)
        if not isinstance(tensor, (Floats, Ints)) or x.name in PYTORCHS:
            continue
        if isinstance(x.type, torch.TensorType):
            changes[f"{x.name} is none"] = {x.name: None}
        if not (decodes and x.name in RECALL):  # which a dense call ignores
            changes[f"{x.name} is sparse"] = {x.name: Ints(1, tensor.shape, tensor.dtype, "sparse")}
        is_written = x.is_write and not decodes and not ("cache" in x.name and a["k"] is None)
        if is_written and max(tensor.shape, default=0) > 1 and 0 not in tensor.shape:
            changes[f"{x.name} is expanded"] = {x.name: replace(tensor, layout="expanded")}
    return changes


def _tensors(specs: dict[str, str], a: Arguments) -> Changes:
    """Break dtypes and sizes, which `TENSORS` tells."""
    given = {name: (a[name], spec) for name, spec in specs.items() if a.get(name) is not None}
    letters = [letter for x, spec in given.values() for letter in spec[1 : len(x.shape) + 1]]
    alone = sum(spec[0] in "xa" for _, spec in given.values()) == 1
    changes: Changes = {}
    for name, (x, spec) in given.items():
        # A decay may have one dimension.
        sizes = "G" if len(x.shape) == 1 and len(spec) == 4 else spec[1:]
        for dtype in OTHER_DTYPES[spec[0].upper() if alone and spec[0] in "xa" else spec[0]]:
            if dtype != x.dtype:
                changes[f"{name} is {dtype}"] = {name: changed(x, dtype=dtype)}
        for dim, letter in enumerate(sizes):
            if letter.isdigit() or (letter != "_" and letters.count(letter) > 1):
                for size in {x.shape[dim] + 1, 0} - {x.shape[dim]}:
                    changes[f"{name} has size {size} in {dim}"] = {name: resized(x, dim, size)}
        changes[f"{name} has a dimension more"] = {name: changed(x, shape=(1, *x.shape))}
        changes[f"{name} has a dimension less"] = {name: changed(x, shape=x.shape[1:])}
    return changes


def _attention(a: Arguments) -> Changes:
    """Break what query, key and value have together."""

    def emptied(dim: int, *names: str) -> Arguments:
        return {name: resized(a[name], dim, 0) for name in names}

    if a["k"] is None:
        return {"no query heads": emptied(1, "q")}
    changes = {
        "no query heads": emptied(1, "q"),
        "no KV heads": emptied(1, "k", "v"),
        "no heads": emptied(1, "q", "k", "v"),
        "no head dim": emptied(3, "q", "k"),
        "no value dim": emptied(3, "v"),
        "all are integers": {x: changed(a[x], dtype="int64") for x in "qkv"},
    }
    if a["k"].shape[1] > 1:
        heads = a["q"].shape[1] + 1
        changes["query heads are no multiple"] = {"q": resized(a["q"], 1, heads)}
    return changes


def _longer_query(a: Arguments) -> Changes:
    if a["k"] is None:
        return {}
    return {"q is longer than k": {"q": resized(a["q"], 2, a["k"].shape[2] + 1)}}


# Doublings, sum of errors, chunks and sum of factors that no head has.
ERRORS = (
    *((-1, 0, 0, 0), (7, 0, 0, 0), (0, -1, 0, 0), (0, 0, -1, -1), (0, 0, 10**9, 10**9)),
    *((0, 0, 2, 1), (0, 0, 1, 65)),
)


def _errors(a: Arguments) -> Changes:
    """Break the errors of the last head."""
    x = a["errors"]
    if x is None or not x.values:
        return {}
    heads = x.values[:-4]
    return {f"errors are {one}": {"errors": replace(x, values=heads + one)} for one in ERRORS}


def _history(a: Arguments) -> Changes:
    """Break the state of earlier calls and the recalled keys."""
    total, past = a["k"].shape[2], a["k"].shape[2] - a["q"].shape[2]
    changes = _attention(a) | _longer_query(a) | _positions(a, "memory", past) | _recall(a, total)
    changes |= _errors(a)
    changes["last_chunk_begin is after the earlier tokens"] = {"last_chunk_begin": past + 1}
    if a["scores"]:
        longer = resized(a["scores"], 2, total + 1)
        changes["scores is longer than the history"] = {"scores": longer}
    return changes


def _buffers(a: Arguments) -> Changes:
    """Break the buffers of `prefill_attention_`."""
    caches, room = ("cache_key", "cache_value"), a["position"].values[0] + a["q"].shape[2]
    changes = _attention(a) | _longer_query(a)
    changes["no position so large"] = {"position": Ints((INT64_MAX, 0), (2,), "int64")}
    if a["position"].values[0]:
        changes |= _errors(a)
    if a["k"]:
        changes["k alone"] = {"v": None}
    if checkpoint := a["checkpoint_memory"]:
        changes["checkpoints in part"] = {"checkpoint_errors": None}
        changes["checkpoints lie apart"] = {
            "checkpoint_memory": replace(checkpoint, layout="sliced")
        }
    if room:
        changes["there is no room"] = {x: resized(a[x], 2, room - 1) for x in caches}
    return changes


def _paged(a: Arguments) -> Changes:
    """Break the pages and the state of one request."""
    total, table, count = a["total"], a["page_table"], a["key_pages"].shape[0]
    changes = _positions(a, "memory", total - a["q"].shape[2]) | _recall(a, total) | _errors(a)
    if a["memory"]:
        changes["a state in part"] = {"scores": None}
    for page in (-1, count) if table.values else ():
        changes[f"page {page} of {count}"] = {
            "page_table": replace(table, values=(page, *table.values[1:]))
        }
    return changes


def _linear(a: Arguments) -> Changes:
    decay, state = a["log_decay"], a["initial_state"]
    longer = {x: resized(a[x], 2, a[x].shape[2] + 1) for x in ("k", "v")}
    changes = {
        "k and v are longer": longer,
        "the decay has two dimensions": {
            "log_decay": Floats(a["k"].shape[:2], "float32", fill="negative")
        },
    }
    if decay and 0 not in decay.shape:
        changes["the decay grows"] = {"log_decay": replace(decay, fill="positive")}
        changes["the decay is nan"] = {"log_decay": replace(decay, fill="nan")}
    if state:
        changes["both directions of a state"] = {"causal": False}
        if not a["normalize"]:
            unused = Floats(state.shape[:3], state.dtype)
            changes["a normalizer is not used"] = {"initial_normalizer": unused}
    if a["initial_normalizer"]:
        changes["the state is missing"] = {"initial_state": None}
    return _attention(a) | changes


def _packed(a: Arguments) -> Changes:
    """Break packed weights and the scales of int8."""
    packed, scales = a["packed"], a["scales"]
    return {
        "a panel more": {"packed": resized(packed, 0, packed.shape[0] + 1)},
        "panels of 15": {"packed": resized(packed, 2, 15)},
        "panels without inputs": {"packed": resized(packed, 1, 0)},
        "an odd input": {"packed": resized(packed, 1, packed.shape[1] + 1)},
        "panels that are not contiguous": {"packed": replace(packed, layout="sliced")},
        "a panel of outputs more": {"outputs": a["outputs"] + 16},
        "a scale more": {"scales": resized(scales, 0, scales.shape[0] + 1)},
    }


def _linear_layer(a: Arguments) -> Changes:
    x, bias = a["x"], a["bias"]
    changes = {
        "x has an input more": {"x": resized(x, len(x.shape) - 1, x.shape[-1] + 1)},
        "x has no dimensions": {"x": changed(x, shape=())},
        "x holds integers": {"x": changed(x, dtype="int64")},
    }
    if bias:
        changes["a bias more"] = {"bias": resized(bias, 0, bias.shape[0] + 1)}
    return changes | _packed(a)


def _embedding(a: Arguments) -> Changes:
    ids = a["ids"]
    changes = {"ids are int32": {"ids": replace(ids, dtype="int32")}}
    for row in (-1, a["outputs"], INT64_MAX) if ids.values else ():
        changes[f"ids hold {row}"] = {"ids": replace(ids, values=(*ids.values[1:], row))}
    return changes | _packed(a)


def _positions(a: Arguments, name: str, length: int, kind: str = "ascending") -> Changes:
    """Break lists of positions below `length`: "ascending" ones, "dense" ones or any."""
    x = a[name]
    if x is None or 0 in x.shape or not x.values:
        return {}
    rows = x.values

    def changed(index: int, *begin: int) -> Arguments:
        """Replace the first positions of a row."""
        row = (*begin, *rows[index][len(begin) :])
        return {name: replace(x, values=(*rows[:index], row, *rows[index + 1 :]))}

    values = {"-5": -5, "the length": length, "2^31 - 1": INT32_MAX, "-2^31": -INT32_MAX - 1}
    changes = {f"{name} holds {what}": changed(0, value) for what, value in values.items()}
    long = next((i for i, row in enumerate(rows) if len(row) > 1 and min(row[:2]) >= 0), None)
    if kind != "any" and long is not None:
        changes[f"{name} holds a position after -1"] = changed(long, -1, rows[long][0])
    if kind == "ascending" and long is not None:
        first, second = rows[long][:2]
        changes[f"{name} holds a position twice"] = changed(long, first, first)
        changes[f"{name} falls"] = changed(long, second, first)
    return changes


def _recall(a: Arguments, length: int) -> Changes:
    """Break the lists of recalled keys."""
    offsets, positions, visible = RECALL
    if a[offsets] is None:
        return {}
    bounds, entries, rows = (a[name].values for name in RECALL)

    def put(name: str, index: int, value: int) -> Arguments:
        values = list(a[name].values)
        values[index] = value
        return {name: replace(a[name], values=tuple(values))}

    changes = {
        "one recall list is missing": {visible: None},
        "two recall lists are missing": {offsets: None, positions: None},
        "recall_offsets is too long": {offsets: Ints((*bounds, bounds[-1]), (len(bounds) + 1,))},
        "recall_offsets does not begin with 0": put(offsets, 0, -1),
        "recall_offsets ends after the lists": put(offsets, -1, INT32_MAX),
    }
    if entries:
        changes["recall_offsets falls"] = put(offsets, 0, len(entries))
        changes["recall_positions holds -1"] = put(positions, 0, -1)
        changes["recall_positions holds the length"] = put(positions, -1, length)
    first = next((begin for begin, end in pairwise(bounds) if end - begin >= 2), None)
    if first is not None:
        twice = put(positions, first + 1, entries[first])
        changes["recall_positions holds a position twice"] = twice
        changes["recall_visible_from falls"] = put(visible, first, rows[first + 1] + 1)
    return changes


OTHERS: dict[str, Callable[[Arguments], Changes]] = {
    "accumulate_scores_": lambda a: _positions(a, "memory", a["scores"].shape[2]),
    "chunked_sparse_attention": _history,
    "chunkwise_linear_attention": _linear,
    "chunkwise_linear_attention_backward": _linear,
    "dense_attention": lambda a: _attention(a) | _longer_query(a),
    "gather_rows": lambda a: _positions(a, "indices", a["x"].shape[2], "any"),
    "intra_chunk_attention": _attention,
    "linear": _linear_layer,
    "pack_linear": lambda a: {
        f"weight of {size} in dimension {dim}": {"weight": resized(a["weight"], dim, size)}
        for dim, size in ((0, 0), (1, 0), (1, 3))
    },
    "packed_embedding": _embedding,
    "memory_attention": lambda a: (
        _attention(a) | _positions(a, "indices", a["k"].shape[2], "dense")
    ),
    "paged_sparse_attention_": _paged,
    "prefill_attention_": _buffers,
    "recall_at_position": lambda a: {
        "token_ids has no room": {"num_tokens": a["token_ids"].shape[1] + 1}
    },
    "select_memory": lambda a: _positions(a, "memory", a["chunk_end"]),
    "sliding_window_attention": lambda a: _attention(a) | _longer_query(a),
}
