"""Arguments as descriptions: small, printable, comparable, and built where they are used.

The representation of a description is Python that makes it again, so that a failing call can be
copied from a report into `tests/fuzz/test_regressions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "sliced", "column", "offset")


@dataclass(frozen=True)
class Floats:
    """A tensor of floating-point numbers."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    # One of `LAYOUTS`: how it lies in memory. "sliced" is a window of a larger buffer that is
    # NaN around it.
    layout: str = "contiguous"
    # "normal", "zeros", "positive", "negative", "huge"; "inf" and "nan" are a few among normal
    # numbers.
    fill: str = "normal"
    seed: int = 0

    def build(self) -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))
        if self.fill == "zeros":
            x = x * 0
        elif self.fill in ("positive", "negative"):
            x = x.abs() if self.fill == "positive" else -x.abs()
        elif self.fill == "huge":
            x = x * 1e4
        elif self.fill != "normal" and x.numel():
            x.view(-1)[:: max(1, x.numel() // 3)] = float(self.fill)
        return _lay_out(x.to(getattr(torch, self.dtype)), self.layout)


@dataclass(frozen=True)
class Ints:
    """A tensor of the listed numbers, or of one throughout."""

    # A number; or numbers one after the other; or rows, which -1 fills up.
    values: Any
    shape: tuple[int, ...]
    dtype: str = "int32"
    # One of `LAYOUTS`; "meta", without memory; or "sparse", a list of its entries.
    layout: str = "contiguous"

    def build(self) -> Tensor:
        dtype, values = getattr(torch, self.dtype), self.values
        if isinstance(values, int):
            x = torch.full(self.shape, values, dtype=dtype)
            return x.to_sparse() if self.layout == "sparse" else _lay_out(x, self.layout)
        if values and isinstance(values[0], tuple):
            values = [x for row in values for x in row + (-1,) * (self.shape[-1] - len(row))]
        x = torch.tensor(values, dtype=torch.int64).to(dtype)
        return _lay_out(x.view(self.shape), self.layout)


def build(argument: Any) -> Any:
    """Return what a description stands for; anything else is returned as it is."""
    if isinstance(argument, (Floats, Ints)):
        return argument.build()
    if isinstance(argument, (list, tuple)):
        return type(argument)(build(item) for item in argument)
    return argument


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "meta":
        return x.to("meta")
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
