"""What memory sets say about the positions that heads keep."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import PrefillConfig


def held_positions(memory: Tensor, length: int) -> Tensor:
    """Mark the positions of memory sets.

    Parameters
    ----------
    memory : Tensor
        int32 [..., M], -1 where absent.
    length : int
        Positions to mark, all of the prompt.

    Returns
    -------
    Tensor
        bool [..., length]
    """
    # One column more takes the absent entries.
    held = torch.zeros(*memory.shape[:-1], length + 1, dtype=torch.bool)
    index = torch.where(memory < 0, length, memory).to(torch.int64)
    return held.scatter_(-1, index, True)[..., :length]


def head_share(memory: Tensor, length: int) -> Tensor:
    """Return the share of KV heads that hold each position.

    Parameters
    ----------
    memory : Tensor
        int32 [chunks, layers, Hkv, M].
    length : int

    Returns
    -------
    Tensor
        fp32 [chunks, layers, length], in 0 .. 1.
    """
    return held_positions(memory, length).float().mean(-2)


def heavy_overlap(memory: Tensor, chunk_ends: tuple[int, ...], config: PrefillConfig) -> Tensor:
    """Return how much of the heavy positions of one memory set the next one still holds as heavy.

    Heavy are the positions of a set that are neither sinks nor in its local window. The measure is
    the Jaccard index |A n B| / |A u B| of a set A and the next one B.

    Parameters
    ----------
    memory : Tensor
        int32 [chunks, layers, Hkv, M].
    chunk_ends : tuple of int
        Where each chunk ends.
    config : PrefillConfig

    Returns
    -------
    Tensor
        fp32 [chunks - 1, layers, Hkv]; NaN where neither set has a heavy position.
    """
    held = held_positions(memory, chunk_ends[-1])
    held[..., : config.sink_tokens] = False
    for index, end in enumerate(chunk_ends):
        held[index, ..., max(0, end - config.local_window) :] = False
    before, after = held[:-1], held[1:]
    return (before & after).sum(-1) / (before | after).sum(-1)
