"""Linear layers whose weights lie in panels of 16 outputs."""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 16
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def pack_linear(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Pack a weight [outputs, inputs]: panels of 16 outputs, and the scales of int8."""
    outputs, inputs = weight.shape
    scales = weight.new_empty(0, dtype=torch.float32)
    if format == "int8":
        weight = weight.float()
        scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
        weight = (weight / scales[:, None]).round()
    packed = torch.zeros(-(-outputs // PANEL), inputs, PANEL, dtype=DTYPES[format])
    packed.view(-1)[_places(outputs, packed)] = weight.to(packed.dtype)
    return packed, scales


def linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Return x weight^T + bias, computed in the dtype of x."""
    y = x @ _unpacked(packed, scales, outputs).to(x.dtype).T
    return y if bias is None else y + bias.to(x.dtype)


def packed_embedding(ids: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """Return rows of the weight in float32."""
    return _unpacked(packed, scales, outputs)[ids]


def _unpacked(packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    weight = packed.reshape(-1)[_places(outputs, packed)].float()
    return weight * scales[:, None] if packed.dtype == torch.int8 else weight


def _places(outputs: int, packed: Tensor) -> Tensor:
    """Return where each weight [outputs, inputs] is in the packed ones."""
    inputs = packed.shape[1]
    output, i = torch.arange(outputs)[:, None], torch.arange(inputs)
    panel, column = output // PANEL * inputs * PANEL, output % PANEL
    if packed.dtype == torch.bfloat16:
        return panel + i // 2 * 2 * PANEL + column * 2 + i % 2
    return panel + i * PANEL + column
