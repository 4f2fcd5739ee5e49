"""Calls of every operator at sizes and settings that are hard: what is named here is not drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from random_calls.calls import Call
from random_calls.descriptions import LAYOUTS, Floats, Ints
from random_calls.draw import Draw
from random_calls.operators import DTYPES, INT32_MAX, TENSORS, draw_arguments

# A chunk; and rows and keys of a step of the CPU kernels.
S, STEP = 32, 1024
SIZES = {"B": 1, "H": 4, "G": 2, "D": 16, "E": 24, "T": 77, "P": 60}
SETTINGS = {
    **{"chunk_size": S, "local_window": 8, "heavy_budget": 8, "sink_tokens": 2, "min_prefill": 1},
    "recall": 0,
}
# Arguments that are not drawn unless an example names others.
FIXED = {"chunk_size": S, "window": 45, "layer": 1, "scale": None, "softcap": 0.0}
SPARSE = ("chunked_sparse_attention", "prefill_attention_")
LOGITS = (*SPARSE, "dense_attention", "sliding_window_attention")
ATTENTION = (*LOGITS, "intra_chunk_attention", "memory_attention")
LINEAR = ("chunkwise_linear_attention", "chunkwise_linear_attention_backward")
LENGTHS = (0, 1, S - 1, S, S + 1, 2 * S - 1, 2 * S + 128)
HEADS = (
    *(((6, 2), layout) for layout in LAYOUTS),
    *((heads, "transposed") for heads in ((4, 4), (7, 1))),
)
DIMS = (
    *((dim, 264 - dim) for dim in range(32, 257, 8)),
    *((192, 128), (1, 1), (20, 16), (16, 20), (264, 64), (64, 320), (33, 65)),
)
BUDGETS = {
    "no memory": {"local_window": 0, "heavy_budget": 0, "sink_tokens": 0},
    "one sink": {"local_window": 0, "heavy_budget": 0, "sink_tokens": 1},
    "one local": {"local_window": 1, "heavy_budget": 0, "sink_tokens": 0},
    "one heavy": {"local_window": 0, "heavy_budget": 1, "sink_tokens": 0},
    "a window longer than the prompt": {"local_window": 400, "heavy_budget": 4},
    "more than the history": {"local_window": 300, "heavy_budget": 300, "sink_tokens": 40},
}
# Of memory sets, around what a block of CUDA threads and its registers take.
CANDIDATES = (257, 256, 255, 8700, 1280, 4096, 4097)
OPTIONS = {
    "all": {
        **{"recall": 2, "dense_tail": 9, "gqa_reduce": "max", "error_rows": 8, "max_widen": 6},
        "error_threshold": 1.2,
    },
    "sinks kept": {"sink_tokens": 5},
    "dense tail": {"dense_tail": 40},
    "widening": {"error_rows": 4, "error_threshold": 0.03, "max_widen": 4},
    "largest vote": {"gqa_reduce": "max"},
    "recall": {"recall": 3},
}
# Softcap, scale, and what fills the sinks. A tiny cap makes all weights equal, a huge one none.
CAPS = (
    *((1.5, None, None), (1.5, None, "normal"), (0.0, None, "normal"), (0.0, None, "-inf")),
    *((0.0, None, "huge"), (3.0, 1.0, "huge"), (1e-300, None, None), (1e-9, None, None)),
    *((1e6, None, None), (1e300, None, None), (1e300, 1e-30, None), (2.0, 0.0, "normal")),
)
LAYERS = ((1, 1), (33, 17), (256, 48), (65, 300))
STEPS = (
    *((rows, end - rows) for end in (STEP + 1, 2 * STEP + 1, 5000) for rows in (1, 3, 100)),
    *((rows, past) for rows in (STEP - 1, STEP, STEP + 1) for past in (0, 700)),
)
WINDOWS = (
    *((3, 5000, window) for window in (100, STEP, STEP + 1, 2 * STEP + 1, 4000)),
    *((STEP + 70, 1100, window) for window in (100, STEP + 1)),
    (2 * STEP + 1, 0, STEP + 1),
)


def examples() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return what each named call has fixed, by operator and what it is about, and by name."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for operators, about, name, example in _examples():
        for index, operator in enumerate(operators):
            calls = found.setdefault((operator, about), {})
            dtype = example.get("dtype") or DTYPES[(index + len(calls)) % 4]
            sizes = {"dtype": dtype, "sizes": SIZES | example.get("sizes", {})}
            settings = SETTINGS | example.get("settings", {})
            whole = {"window": None} if operator == "prefill_attention_" else {}
            fixed = FIXED | whole | example.get("fixed", {})
            calls[name] = {**example, **sizes, "settings": settings, "fixed": fixed}
    return found


def named_call(operator: str, name: str, example: dict[str, Any]) -> Call:
    """Return the call that an example describes."""
    draw = Draw(random.Random(f"{operator} {name}"))
    return Call(operator, draw_arguments(draw, operator, **example), "valid")


def _examples() -> Iterator[tuple[tuple[str, ...], str, str, dict[str, Any]]]:
    for tokens, past in product(LENGTHS, (0, 45)):
        sizes = {"T": tokens, "P": past}
        yield tuple(TENSORS), "lengths", f"{tokens} tokens after {past}", {"sizes": sizes}
    yield (*ATTENTION, *LINEAR[:1]), "lengths", "no batch", {"sizes": {"B": 0, "T": 5}}
    for dtype, ((heads, kv_heads), layout) in product(DTYPES, HEADS):
        sizes = {"B": 2, "H": heads, "G": kv_heads, "D": 32, "E": 48}
        name = f"{heads} heads of {kv_heads}, {layout}, {dtype}"
        operators = (*ATTENTION, *LINEAR[: 2 if layout == "transposed" else 1])
        example = {"sizes": sizes, "dtype": dtype, "layout": layout}
        yield operators, "heads and layouts", name, example
    for dim, value_dim in DIMS:
        sizes = {"H": 2, "G": 1, "D": dim, "E": value_dim, "T": 70, "P": 20}
        operators = (*ATTENTION, *LINEAR[: 2 if dim % 32 < 8 else 1])
        yield operators, "head dims", f"{dim} and {value_dim}", {"sizes": sizes}
    for dtype, rows in product(DTYPES, (1, 8)):
        sizes = {"D": 192, "E": 128, "T": rows}
        example = {"sizes": sizes, "dtype": dtype}
        yield LOGITS, "latent heads", f"{rows} rows of latent heads, {dtype}", example
    for name, budgets in BUDGETS.items():
        yield ("select_memory",), "budgets", name, {"fixed": budgets}
    for count in CANDIDATES:
        scores = {"scores": Floats((1, 2, count), fill="ties"), "heavy_budget": count // 3}
        fixed = {**scores, "local_window": 0, "sink_tokens": 0}
        example = {"sizes": {"T": count, "P": 0}, "fixed": fixed}
        yield ("select_memory",), "candidates", str(count), example
    pasts = zip(("float32", "float32", *DTYPES[1:]), (0, 45, 0, 45, 45), strict=True)
    for (name, settings), (dtype, past) in product((OPTIONS | BUDGETS).items(), pasts):
        example = {"settings": settings, "dtype": dtype, "sizes": {"T": 150, "P": past}}
        yield SPARSE, "settings", f"{name} after {past}, {dtype}", example
    for (softcap, scale, fill), dtype in product(CAPS, DTYPES):
        sinks = None if fill is None else Floats((4,), fill=fill, seed=3)
        fixed = {"softcap": softcap, "scale": scale, "sinks": sinks}
        name = f"softcap {softcap}, scale {scale}, sinks {fill}, {dtype}"
        # Without a past: scores of earlier calls would make near ties of equal weights.
        example = {"fixed": fixed, "dtype": dtype, "sizes": {"T": 100, "P": 0}}
        yield SPARSE, "sinks and softcap", name, example
        for rows, past in ((5, 3000), (77, 60)):
            example = {"fixed": fixed, "dtype": dtype, "sizes": {"T": rows, "P": past}}
            yield LOGITS[2:], "sinks and softcap", f"{name}, {rows} rows after {past}", example
    distant = {"sizes": {"T": 16 * S, "P": 0}, "fixed": {"scale": 5.0}, "dtype": "float32"}
    yield ATTENTION, "distant logits", "of up to 100", distant
    for size in (1, 7, 113, 300, INT32_MAX):
        example = {"sizes": {"T": 203, "G": 4}, "fixed": {"chunk_size": size}}
        yield ("intra_chunk_attention", LINEAR[0]), "chunks", f"of {size}", example
    few = {"H": 2, "G": 1, "D": 32}
    for dtype, (rows, past) in product(("float32", "bfloat16"), STEPS):
        example = {"dtype": dtype, "sizes": few | {"T": rows, "P": past}}
        yield ("dense_attention",), "several steps", f"{rows} rows after {past}, {dtype}", example
    for rows, past, window in WINDOWS:
        example = {"sizes": few | {"T": rows, "P": past}, "fixed": {"window": window}}
        name = f"{rows} rows after {past} of {window}"
        yield ("sliding_window_attention",), "several steps", name, example
    for dtype in ("float32", "bfloat16"):
        long = {"dtype": dtype, "sizes": few | {"T": STEP + 276, "P": 0}}
        chunks = {"chunk_size": 608, "local_window": 300, "heavy_budget": 300, "recall": 3}
        yield SPARSE, "several steps", dtype, long | {"settings": chunks}
        inside = long | {"fixed": {"chunk_size": STEP + 7}}
        yield ("intra_chunk_attention",), "several steps", dtype, inside
        keys = Ints((tuple(range(0, 4500, 3)),), (1, 1, 1500))
        many = long | {"sizes": few | {"T": 100, "P": 4500}, "fixed": {"indices": keys}}
        yield ("memory_attention",), "several steps", dtype, many
        yield LINEAR[:1], "several steps", dtype, long | {"sizes": few | {"T": 2500}}
        yield LINEAR[1:], "several steps", dtype, long
        decays = {"log_decay": Floats((1, 1, STEP + 276), fill="decay")}
        yield LINEAR, "several steps", f"decays that erase, {dtype}", long | {"fixed": decays}
    counts, formats = (*range(1, 8), 130, 300, 1100), ("bfloat16", "float16", "int8")
    for tokens, format, (dim, value_dim) in product(counts, formats, LAYERS):
        sizes = {"T": tokens, "D": dim, "E": value_dim}
        example = {"sizes": sizes, "fixed": {"format": format}}
        if tokens == 300:  # By oneDNN, where the CPU multiplies bfloat16.
            example["dtype"] = "bfloat16"
        yield ("linear",), "layers", f"{tokens} tokens, {value_dim} x {dim} of {format}", example
    in_place = {"sizes": {"T": 20, "P": 30}, "dtype": "float32"}
    nothing = {"scores": Floats((1, 2, 0)), "memory": Ints((), (1, 2, 0))}
    dense = {"settings": {"dense_layers": (1,)}, "fixed": nothing}
    yield ("prefill_attention_",), "in place", "a dense layer without scores", in_place | dense
    yield ("prefill_attention_",), "in place", "a window", {"fixed": {"window": 45}}
    every = {
        **{"checkpoint_memory": Ints(0, (2, 1, 2, 18)), "checkpoint_scores": Floats((2, 1, 2, 18))},
        **{"checkpoint_errors": Floats((2, 1, 2, 4)), "sinks": Floats((4,))},
    }
    all_tensors = {"settings": {"recall": 2, "error_rows": 4, "max_widen": 1}, "fixed": every}
    sizes = {"sizes": {"T": 77, "P": 0}, "dtype": "float32"}
    yield ("prefill_attention_",), "in place", "every tensor", sizes | all_tensors
    caches = {x: Floats((1, 2, 55, d)) for x, d in (("cache_key", 16), ("cache_value", 24))}
    there = in_place | {"fixed": caches | {"k": None, "v": None}}
    yield ("prefill_attention_",), "in place", "keys that are there", there
