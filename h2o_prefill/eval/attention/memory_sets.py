"""What memory sets hold: int32 [..., M], ascending positions, -1 where absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stack_layers(layers: Sequence[Tensor], fill: float, dim: int) -> Tensor:
    """Stack the tensors of all layers along a new dimension; `fill` pads the smaller ones."""
    largest = [max(sizes) for sizes in zip(*(layer.shape for layer in layers), strict=True)]
    padded = []
    for layer in layers:
        whole = layer.new_full(largest, fill)
        whole[tuple(map(slice, layer.shape))] = layer
        padded.append(whole)
    return torch.stack(padded, dim=dim)


def held_positions(memory: Tensor, length: int) -> Tensor:
    """Mark the positions that memory sets hold, bool [..., length]."""
    # The additional column takes the absent entries.
    held = torch.zeros(*memory.shape[:-1], length + 1, dtype=torch.bool, device=memory.device)
    index = torch.where(memory < 0, length, memory).to(torch.int64)
    return held.scatter_(-1, index, True)[..., :length]


def jaccard(first: Tensor, second: Tensor) -> Tensor:
    """Return |A n B| / |A u B| of marked positions, fp32 [...]; NaN where both are empty."""
    return (first & second).sum(-1) / (first | second).sum(-1)
