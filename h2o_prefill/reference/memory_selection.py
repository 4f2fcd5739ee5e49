r"""Task 4 of the method: choose the positions that the next chunk may look back at.

After chunk c the memory set of a KV head is

    M_c = sinks  +  local  +  heavy
          first K   last L    the H best scored of the other candidates

and the candidates are M_{c-1} and chunk c itself. So a position of chunk 0 can live for ever as
long as it keeps its score, and one that leaves never returns: it is no candidate any more.

Every function works on one set of heads. Where a leading dimension is called `num_layers`, nothing
depends on it being layers: the oracle of the operators passes a batch there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h2o_prefill.reference.gather import gather_rows


def get_local_window_indices(chunk_end: int, local_window_size: int) -> Tensor:
    """Return the last L positions before the end of a chunk.

    Parameters
    ----------
    chunk_end : int
        The position after the last of the chunk.
    local_window_size : int
        L. A window longer than the text is clamped at position 0.

    Returns
    -------
    Tensor
        int32 [min(L, chunk_end)], ascending.

    Raises
    ------
    ValueError
        If an argument is negative.
    """
    _check_not_negative("chunk_end", chunk_end)
    _check_not_negative("local_window_size", local_window_size)
    return torch.arange(max(chunk_end - local_window_size, 0), chunk_end, dtype=torch.int32)


def get_heavy_hitter_candidates(
    prev_memory_indices: Tensor | None,
    chunk_start: int,
    chunk_end: int,
    local_indices: Tensor,
    sink_tokens: int = 0,
) -> list[set[int]]:
    """Return the positions that compete for the heavy budget, per head.

    Parameters
    ----------
    prev_memory_indices : Tensor, optional
        int32 [num_heads, M], -1 where absent. None for chunk 0, whose candidates are the same for
        every head: one set comes back.
    chunk_start, chunk_end : int
        The chunk is [chunk_start, chunk_end).
    local_indices : Tensor
        int32 [L], the local window; it is retained anyway and does not compete.
    sink_tokens : int
        K, the first positions; they are retained anyway too.

    Returns
    -------
    list of set of int
        (previous memory + chunk) - local - sinks.
    """
    retained = set(local_indices.tolist()) | set(range(sink_tokens))
    chunk = set(range(chunk_start, chunk_end))
    previous = [[]] if prev_memory_indices is None else prev_memory_indices.tolist()
    return [(chunk | {j for j in head if 0 <= j < chunk_start}) - retained for head in previous]


def select_heavy_hitters(scores: Tensor, candidates: list[set[int]], heavy_budget: int) -> Tensor:
    """Select the H candidates of the highest score, per head.

    Parameters
    ----------
    scores : Tensor
        [num_heads, T]. A position beyond T was never scored and counts as 0; nan ranks last.
    candidates : list of set of int
        One set per head.
    heavy_budget : int
        H.

    Returns
    -------
    Tensor
        int32 [num_heads, H], best first, padded with -1. Of equal scores the lower position wins.

    Raises
    ------
    ValueError
        If H is negative or the number of sets is not the number of heads.
    """
    _check_not_negative("heavy_budget", heavy_budget)
    if len(candidates) != scores.shape[0]:
        raise ValueError(
            f"candidates must hold one set per head ({scores.shape[0]}), got {len(candidates)}"
        )
    chosen = []
    for head, positions in zip(scores.tolist(), candidates, strict=True):
        ranked = sorted(positions, key=lambda j: (-_score(head, j), j))
        chosen.append(_pad(ranked[:heavy_budget], heavy_budget))
    return torch.tensor(chosen, dtype=torch.int32).reshape(len(chosen), heavy_budget)


def build_memory_set(
    prev_memory: Tensor | None,
    chunk_start: int,
    chunk_end: int,
    scores: Tensor,
    local_window_size: int,
    heavy_budget: int,
    sink_tokens: int = 0,
) -> Tensor:
    """Build the memory set that the chunk after [chunk_start, chunk_end) attends to.

    Parameters
    ----------
    prev_memory : Tensor, optional
        int32 [num_layers, num_heads, M], the set that this chunk attended to, -1 where absent.
        None if it attended to none.
    chunk_start, chunk_end : int
        The chunk just scored.
    scores : Tensor
        [num_layers, num_heads, T].
    local_window_size, heavy_budget, sink_tokens : int
        L, H and K.

    Returns
    -------
    Tensor
        int32 [num_layers, num_heads, K + L + H] on the device of `scores`, ascending, padded with
        -1 at the end where the text is too short to fill it.

    Raises
    ------
    ValueError
        If a size is negative or the chunk ends before it starts.
    """
    _check_not_negative("chunk_start", chunk_start)
    _check_not_negative("sink_tokens", sink_tokens)
    if chunk_end < chunk_start:
        raise ValueError(f"chunk_end must be >= chunk_start ({chunk_start}), got {chunk_end}")
    num_layers, num_heads = scores.shape[:2]
    local = get_local_window_indices(chunk_end, local_window_size)
    retained = set(local.tolist()) | set(range(min(sink_tokens, chunk_end)))
    width = sink_tokens + local_window_size + heavy_budget
    memory = torch.full((num_layers, num_heads, width), -1, dtype=torch.int32)
    for layer in range(num_layers):
        previous = None if prev_memory is None else prev_memory[layer]
        candidates = get_heavy_hitter_candidates(
            previous, chunk_start, chunk_end, local, sink_tokens
        )
        if previous is None:
            candidates = candidates * num_heads
        heavy = select_heavy_hitters(scores[layer], candidates, heavy_budget)
        for head, best in enumerate(heavy.tolist()):
            members = sorted(retained | {j for j in best if j >= 0})
            memory[layer, head] = torch.tensor(_pad(members, width), dtype=torch.int32)
    return memory.to(scores.device)


def gather_memory_kv(kv_cache: Tensor, memory_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of the memory set, each head its own.

    Keys are cached after RoPE with absolute positions, so a gathered key needs no change.

    Parameters
    ----------
    kv_cache : Tensor
        [num_layers, 2, num_heads, max_seq_len, head_dim].
    memory_indices : Tensor
        int32 [num_layers, num_heads, M], -1 where absent.

    Returns
    -------
    tuple of Tensor
        Keys and values, [num_layers, num_heads, M, head_dim]; absent rows are 0 and must be masked.
    """
    keys, values = kv_cache[:, 0], kv_cache[:, 1]
    return gather_rows(keys, memory_indices), gather_rows(values, memory_indices)


def _score(scores: list[float], position: int) -> float:
    score = scores[position] if position < len(scores) else 0.0
    return -math.inf if math.isnan(score) else score


def _pad(positions: list[int], width: int) -> list[int]:
    return positions + [-1] * (width - len(positions))


def _check_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}")
