"""Values that may stand for any argument, whatever it should be."""

from __future__ import annotations

from typing import Any

from random_calls.descriptions import Floats, Ints
from random_calls.draw import Draw

INTEGERS = (0, 1, -1, 2, 7, 64, 2**22, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**63 - 1, -(2**63))
TEXTS = (
    *("h2o", "spec", "recommended", "h2o,", "h2o,,", "=", "h2o,chunk_size=\x00"),
    "h2o,chunk_size=1,min_prefill=1",
    "h2o,chunk_size=2147483647",
    "h2o,dense_layers=" + "+".join("9" * 400),
    "h2o,local_window=4194304,heavy_budget=4194304,sink_tokens=4194304",
)
FLOATS = (0.0, -1.0, 1e308, -1e-308, float("nan"), float("inf"))


def integer(draw: Draw) -> int:
    """Draw a bound of an integer type, or a small one."""
    return draw.choice(INTEGERS) if draw.chance(0.5) else draw.integer(-3, 300)


def tensor(draw: Draw) -> Floats | Ints:
    """Draw a tensor of any shape and kind."""
    shape = tuple(draw.choice([0, 1, 2, 3, 8, 17]) for _ in range(draw.integer(0, 5)))
    kind = draw.choice(["floats", "filled", "ints", "sparse"])
    if kind == "floats":
        dtype = draw.choice(["float32", "bfloat16", "float16", "float64", "complex64"])
        layout = draw.choice(["contiguous", "transposed", "sliced", "offset"])
        return Floats(shape, dtype, layout, draw.choice(["normal", "zeros", "huge", "inf", "nan"]))
    if kind == "ints":
        values = tuple(max(-(2**31), min(integer(draw), 2**31 - 1)) for _ in shape)
        return Ints(values, (1, 1, len(values)))
    if kind == "sparse":
        return Ints(1, shape, "float32", "sparse")
    dtype = draw.choice(["int32", "int64", "uint8", "bool", "float32"])
    return Ints(draw.choice([-1, 0, 1, 5]), shape, dtype, draw.choice(["contiguous", "meta"]))


def text(draw: Draw) -> str:
    """Draw a text: settings at the edge of the grammar, or letters of any alphabet."""
    if draw.chance(0.6):
        return draw.choice(TEXTS)
    letters = [chr(draw.integer(0, draw.choice([127, 0x2FFF]))) for _ in range(draw.integer(0, 8))]
    return "".join(letters)


def anything(draw: Draw) -> Any:
    """Draw any of these."""
    kind = draw.choice([None, integer, tensor, text, FLOATS])
    return draw.choice(kind) if kind is FLOATS else kind and kind(draw)
