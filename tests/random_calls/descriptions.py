"""Arguments as descriptions: small, printable, comparable, and built where they are used.

The representation of a description is Python that makes it again, so that a failing call can be
copied from a report into `tests/fuzz/test_regressions.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from random_calls.draw import Draw
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "sliced", "column", "offset")
# Values at the edges, for any argument.
INTEGERS = (0, 1, -1, 2, 7, 64, 2**22, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**63 - 1, -(2**63))
TEXTS = (
    *("h2o", "recommended", "h2o,", "h2o,,", "=", "h2o,chunk_size=\x00"),
    "h2o,chunk_size=1,min_prefill=1",
    "h2o,chunk_size=2147483647",
    "h2o,dense_layers=" + "+".join("9" * 400),
    "h2o,local_window=4194304,heavy_budget=4194304,sink_tokens=4194304",
)
FLOATS = (0.0, -1.0, 1e308, -1e-308, float("nan"), float("inf"))


@dataclass(frozen=True)
class Floats:
    """A tensor of floating-point numbers."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    # One of `LAYOUTS`: how it lies in memory. "sliced" is a window of a larger buffer that is
    # NaN around it.
    layout: str = "contiguous"
    # "normal", "zeros", "positive", "negative", "huge"; "ties", few distinct numbers; "inf", "-inf"
    # and "nan" are a few among normal numbers; "bytes", integers of 8 bits; "decay", logarithms of
    # numbers near 1, and a few near and at 0.
    fill: str = "normal"
    seed: int = 0
    # Rows from this one on, in the dimension before the last, are NaN: nothing has written them.
    rows: int | None = None

    def build(self, device: str = "cpu") -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))
        if self.fill == "zeros":
            x = x * 0
        elif self.fill in ("positive", "negative"):
            x = x.abs() if self.fill == "positive" else -x.abs()
        elif self.fill == "decay":
            x = -(x.abs() ** 6) / 100
            x.view(-1)[7::50], x.view(-1)[9::70] = -20, float("-inf")
        elif self.fill == "bytes":
            x = (40 * x).clamp(-127, 127)
        elif self.fill == "ties":
            x = x.abs().round()
        elif self.fill == "huge":
            x = x * 1e4
        elif self.fill != "normal" and x.numel():
            x.view(-1)[:: max(1, x.numel() // 3)] = float(self.fill)
        if self.rows is not None:
            x[..., self.rows :, :] = float("nan")
        return _lay_out(x.to(device, getattr(torch, self.dtype)), self.layout)


@dataclass(frozen=True)
class Ints:
    """A tensor of the listed numbers, or of one throughout."""

    # A number; or numbers one after the other; or rows, which -1 fills up.
    values: Any
    shape: tuple[int, ...]
    dtype: str = "int32"
    # One of `LAYOUTS`; "meta", without memory; or "sparse", a list of its entries.
    layout: str = "contiguous"

    def build(self, device: str = "cpu") -> Tensor:
        dtype, values = getattr(torch, self.dtype), self.values
        if isinstance(values, int):
            x = torch.full(self.shape, values, dtype=dtype, device=device)
            return x.to_sparse() if self.layout == "sparse" else _lay_out(x, self.layout)
        if values and isinstance(values[0], tuple):
            values = [x for row in values for x in row + (-1,) * (self.shape[-1] - len(row))]
        x = torch.tensor(values, dtype=torch.int64).to(device, dtype)
        return _lay_out(x.view(self.shape), self.layout)


def build(argument: Any, device: str = "cpu") -> Any:
    """Return what a description stands for; anything else is returned as it is."""
    if isinstance(argument, (Floats, Ints)):
        return argument.build(device)
    if isinstance(argument, (list, tuple)):
        return type(argument)(build(item, device) for item in argument)
    return argument


def build_all(arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Return what the arguments of a call stand for. Positions are read on the CPU."""
    return {n: build(x, "cpu" if n == "position" else device) for n, x in arguments.items()}


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "meta":
        return x.to("meta")
    if layout == "expanded":  # what is the same along a dimension lies there once
        dim = next(i for i, size in enumerate(x.shape) if size > 1)
        return x.narrow(dim, 0, 1).expand(x.shape)
    if layout == "transposed" and x.dim() >= 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "column" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    outside = float("nan") if x.is_floating_point() else 77
    if layout == "offset":
        room = x.new_full((x.numel() + 1,), outside)[1:]
        return room.view(x.shape).copy_(x)
    if layout == "sliced":
        room = x.new_full([n + 3 for n in x.shape], outside)
        return room[tuple(slice(1, n + 1) for n in x.shape)].copy_(x)
    return x


def wild_integer(draw: Draw) -> int:
    """Draw a bound of an integer type, or a small one."""
    return draw.choice(INTEGERS) if draw.chance(0.5) else draw.integer(-3, 300)


def wild_tensor(draw: Draw) -> Floats | Ints:
    """Draw a tensor of any shape and kind."""
    shape = tuple(draw.choice([0, 1, 2, 3, 8, 17]) for _ in range(draw.integer(0, 5)))
    kind = draw.choice(["floats", "filled", "ints", "sparse"])
    if kind == "floats":
        dtype = draw.choice(["float32", "bfloat16", "float16", "float64", "complex64"])
        layout = draw.choice(["contiguous", "transposed", "sliced", "offset"])
        return Floats(shape, dtype, layout, draw.choice(["normal", "zeros", "huge", "inf", "nan"]))
    if kind == "ints":
        values = tuple(max(-(2**31), min(wild_integer(draw), 2**31 - 1)) for _ in shape)
        return Ints(values, (1, 1, len(values)))
    if kind == "sparse":
        return Ints(1, shape, "float32", "sparse")
    dtype = draw.choice(["int32", "int64", "uint8", "bool", "float32"])
    return Ints(draw.choice([-1, 0, 1, 5]), shape, dtype, draw.choice(["contiguous", "meta"]))


def wild_text(draw: Draw) -> str:
    """Draw a text: settings at the edge of the grammar, or letters of any alphabet."""
    if draw.chance(0.6):
        return draw.choice(TEXTS)
    letters = [chr(draw.integer(0, draw.choice([127, 0x2FFF]))) for _ in range(draw.integer(0, 8))]
    return "".join(letters)


def anything(draw: Draw) -> Any:
    """Draw any of these."""
    kind = draw.choice([None, wild_integer, wild_tensor, wild_text, FLOATS])
    return draw.choice(kind) if kind is FLOATS else kind and kind(draw)
