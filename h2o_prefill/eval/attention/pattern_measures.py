"""What memory sets say about the positions that heads keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig


class MemorySets(Protocol):
    """A result that holds the memory sets of a prompt: of `memory`, what they are the sets of."""

    @property
    def memory(self) -> Tensor:
        """int32 [chunks, layers, Hkv, M]."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers."""

    @property
    def chunk_ends(self) -> tuple[int, ...]:
        """Where each chunk ends."""


def stack_layers(layers: Sequence[Tensor], fill: float, heads_dim: int = 1) -> Tensor:
    """Stack the tensors of all layers, in front of their heads.

    Parameters
    ----------
    layers : sequence of Tensor
        Of the same number of dimensions.
    fill : float
        Where a layer has less than another: fewer heads, a smaller memory set.
    heads_dim : int
        Which dimension the heads are.

    Returns
    -------
    Tensor
        With one dimension more, the layers, at `heads_dim`.
    """
    largest = [max(sizes) for sizes in zip(*(layer.shape for layer in layers), strict=True)]
    filled = []
    for layer in layers:
        whole = layer.new_full(largest, fill)
        whole[tuple(slice(size) for size in layer.shape)] = layer
        filled.append(whole)
    return torch.stack(filled, dim=heads_dim)


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
    held = torch.zeros(*memory.shape[:-1], length + 1, dtype=torch.bool, device=memory.device)
    index = torch.where(memory < 0, length, memory).to(torch.int64)
    return held.scatter_(-1, index, True)[..., :length]


def head_share(memory: Tensor, length: int, kv_heads: Sequence[int] | None = None) -> Tensor:
    """Return the share of KV heads that hold each position.

    Parameters
    ----------
    memory : Tensor
        int32 [chunks, layers, Hkv, M].
    length : int
    kv_heads : sequence of int, optional
        KV heads of each layer; the rest of Hkv is filling. Default: all have Hkv.

    Returns
    -------
    Tensor
        fp32 [chunks, layers, length], in 0 .. 1.
    """
    heads = torch.tensor(kv_heads or [memory.shape[2]]).unsqueeze(-1)
    return held_positions(memory, length).sum(-2) / heads


def memory_jaccard(memory: Tensor, length: int) -> Tensor:
    """Return the Jaccard index |A n B| / |A u B| of every memory set A and the next one B.

    Whole sets, the local window included: it moves on with each chunk, so that sets whose heavy
    positions all stay have an index below 1 (`heavy_overlap` leaves it out).

    Parameters
    ----------
    memory : Tensor
        int32 [chunks, layers, Hkv, M].
    length : int

    Returns
    -------
    Tensor
        fp32 [chunks - 1, layers, Hkv]; NaN where both sets are empty.
    """
    held = held_positions(memory, length)
    return _jaccard(held[:-1], held[1:])


def run_jaccard(first: MemorySets, second: MemorySets) -> Tensor:
    """Return the Jaccard index of the memory sets of two runs over one prompt.

    Parameters
    ----------
    first, second : AttentionPatterns or AttentionMeasures
        With other settings, or of another model of the same shape; chunks and layers are the same.

    Returns
    -------
    Tensor
        fp32 [chunks, layers, Hkv], of the sets after each chunk; NaN where both sets are empty.

    Raises
    ------
    ValueError
        If chunks, layers or KV heads differ.
    """
    for name in ("chunk_ends", "layers"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            raise ValueError(f"{name} must be the same in both runs, got {ours} and {theirs}")
    heads = first.memory.shape[2], second.memory.shape[2]
    if heads[0] != heads[1]:
        raise ValueError(f"KV heads must be the same in both runs, got {heads[0]} and {heads[1]}")
    length = first.chunk_ends[-1]
    return _jaccard(held_positions(first.memory, length), held_positions(second.memory, length))


def heavy_positions(
    memory: Tensor,
    chunk_ends: tuple[int, ...],
    config: PrefillConfig,
    layers: Sequence[int] | None = None,
) -> Tensor:
    """Mark the heavy positions of memory sets: neither sinks nor in the local window.

    Parameters
    ----------
    memory : Tensor
        int32 [chunks, layers, Hkv, M].
    chunk_ends : tuple of int
        Where each chunk ends.
    config : PrefillConfig
    layers : sequence of int, optional
        The layers' numbers in the model. Default: from 0 on.

    Returns
    -------
    Tensor
        bool [chunks, layers, Hkv, chunk_ends[-1]]
    """
    layers = range(memory.shape[1]) if layers is None else layers
    windows = [config.of_layer(layer).local_window for layer in layers]
    held = held_positions(memory, chunk_ends[-1])
    held[..., : config.sink_tokens] = False
    for index, end in enumerate(chunk_ends):
        for row, window in enumerate(windows):
            held[index, row, :, max(0, end - window) :] = False
    return held


def heavy_overlap(heavy: Tensor) -> Tensor:
    """Return how much of the heavy positions of one memory set the next one still holds as heavy.

    The Jaccard index |A n B| / |A u B| of the heavy positions of a set A and of the next one B.

    Parameters
    ----------
    heavy : Tensor
        bool [chunks, layers, Hkv, length], as `heavy_positions` returns it.

    Returns
    -------
    Tensor
        fp32 [chunks - 1, layers, Hkv]; NaN where neither set has a heavy position.
    """
    return _jaccard(heavy[:-1], heavy[1:])


def heavy_survival(heavy: Tensor) -> Tensor:
    """Return for how many chunks heavy positions stay in the memory set.

    Entry n is the share, among all pairs of KV head and position that were heavy for the first time
    n or more sets before the last one, of those still heavy n sets later. (A position that entered
    later says nothing yet of n; one that has left never returns.)

    Parameters
    ----------
    heavy : Tensor
        As `heavy_overlap` takes it.

    Returns
    -------
    Tensor
        fp32 [chunks, layers]; entry 0 is 1. NaN where no position was heavy early enough.
    """
    sets = heavy.shape[0]
    lifetime = heavy.sum(0)
    entered = torch.where(lifetime > 0, heavy.int().argmax(0), sets)
    shares = []
    for later in range(sets):
        seen = entered < sets - later
        shares.append((seen & (lifetime > later)).sum((-1, -2)) / seen.sum((-1, -2)))
    return torch.stack(shares)


def _jaccard(first: Tensor, second: Tensor) -> Tensor:
    return (first & second).sum(-1) / (first | second).sum(-1)
