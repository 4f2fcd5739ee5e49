"""The attention that each position received, the memory set that it selects, and the set's rows.

A position's own chunk gives it a first score. Every later chunk whose memory set contains it adds
to it once, after the chunk's attention, not token by token. Scores never fall.

After chunk c the memory set of a KV head is

    M_c = sinks  +  local  +  heavy
          first K   last L    the other candidates with the H highest scores

and the candidates are M_{c-1} and chunk c itself. So a position of chunk 0 stays as long as it
keeps its rank, and one that leaves never returns: it is no candidate any more.

Where a leading dimension is called `num_layers`, nothing depends on it being layers: the oracle of
the operators passes a batch there. Memory sets are int32, ascending, padded with -1 at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ScoreTracker:
    """Scores [num_layers, num_heads (KV heads), max_seq_len], 0 where nothing was scored yet.

    Weights are [num_heads, queries, columns]; with a further dimension for the G query heads of a
    group, [num_heads, G, queries, columns], `gqa_reduce` ("sum" or "max") combines their sums.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        gqa_reduce: str = "sum",
    ) -> None:
        self.scores = torch.zeros(num_layers, num_heads, max_seq_len, dtype=dtype, device=device)
        self.gqa_reduce = gqa_reduce

    def set_initial_scores(
        self, layer_idx: int, chunk_start: int, chunk_end: int, intra_attention_weights: Tensor
    ) -> None:
        """Set the first scores of a chunk: the column sums of its own attention."""
        sums = self._column_sums(intra_attention_weights)
        self.scores[layer_idx, :, chunk_start:chunk_end] = sums

    def accumulate_scores(
        self, layer_idx: int, memory_indices: Tensor, inter_attention_weights: Tensor
    ) -> None:
        """Add the column sums of a chunk's attention to its memory set, [num_heads, M]."""
        sums = self._column_sums(inter_attention_weights).masked_fill(memory_indices < 0, 0)
        self.scores[layer_idx].scatter_add_(-1, memory_indices.long().clamp(min=0), sums)

    def get_scores(self, layer_idx: int, indices: Tensor) -> Tensor:
        """Return the scores of candidates [num_heads, any]; -inf where the index is -1."""
        scores = self.scores[layer_idx].gather(-1, indices.long().clamp(min=0))
        return scores.masked_fill(indices < 0, -torch.inf)

    def _column_sums(self, weights: Tensor) -> Tensor:
        sums = weights.detach().sum(dim=-2)  # a selection has no gradient
        if sums.dim() == 3:
            sums = sums.amax(dim=1) if self.gqa_reduce == "max" else sums.sum(dim=1)
        return sums.to(self.scores.dtype)


def get_local_window_indices(chunk_end: int, local_window_size: int) -> Tensor:
    """Return the last L positions before the end of a chunk, int32 [min(L, chunk_end)]."""
    _check_not_negative("local_window_size", local_window_size)
    return torch.arange(max(chunk_end - local_window_size, 0), chunk_end, dtype=torch.int32)


def get_heavy_hitter_candidates(
    prev_memory_indices: Tensor | None,
    chunk_start: int,
    chunk_end: int,
    local_indices: Tensor,
    sink_tokens: int = 0,
) -> list[set[int]]:
    """Return each head's heavy-hitter candidates: previous memory + chunk - local - sinks.

    Without a previous memory [num_heads, M] the candidates of all heads are the same: one set.
    """
    retained = set(local_indices.tolist()) | set(range(sink_tokens))
    chunk = set(range(chunk_start, chunk_end))
    previous = [[]] if prev_memory_indices is None else prev_memory_indices.tolist()
    return [(chunk | {j for j in head if 0 <= j < chunk_start}) - retained for head in previous]


def select_heavy_hitters(scores: Tensor, candidates: list[set[int]], heavy_budget: int) -> Tensor:
    """Select each head's H candidates of the highest score, int32 [num_heads, H], best first.

    scores [num_heads, T]: a position beyond T was never scored and counts as 0; nan ranks last. Of
    equal scores the lower position wins.
    """
    _check_not_negative("heavy_budget", heavy_budget)
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
    """Build the set that the chunk after [chunk_start, chunk_end) attends to, [..., K + L + H].

    prev_memory [num_layers, num_heads, M] is the set that this chunk attended to, None if it
    attended to none; scores [num_layers, num_heads, T].
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
    if prev_memory is None:
        prev_memory = memory[..., :0]
    for layer in range(num_layers):
        candidates = get_heavy_hitter_candidates(
            prev_memory[layer], chunk_start, chunk_end, local, sink_tokens
        )
        heavy = select_heavy_hitters(scores[layer], candidates, heavy_budget)
        for head, best in enumerate(heavy.tolist()):
            members = sorted(retained | {j for j in best if j >= 0})
            memory[layer, head] = torch.tensor(_pad(members, width), dtype=torch.int32)
    return memory.to(scores.device)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Gather rows of x [..., T, D] by each head's own indices [..., M]; -1 gives a row of 0."""
    absent = indices < 0
    if x.shape[-2] == 0:  # nothing to point at: every index must be -1
        return x.new_zeros(*indices.shape, x.shape[-1])
    rows = indices.long().masked_fill(absent, 0)
    taken = x.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, x.shape[-1]))
    return taken.masked_fill(absent.unsqueeze(-1), 0)


def sorted_gather(cache: Tensor, indices: Tensor) -> Tensor:
    """Gather as `gather_rows` does, in ascending order of the index.

    Reading in ascending order touches every cache line once, so this pays off for unsorted indices;
    memory sets are ascending already.
    """
    ascending, order = indices.sort(dim=-1)
    rows = gather_rows(cache, ascending)
    back = order.argsort(dim=-1)
    return torch.gather(rows, -2, back.unsqueeze(-1).expand_as(rows))


def gather_memory_kv(
    kv_cache: Tensor | tuple[Tensor, Tensor], memory_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the memory set [..., M]; absent rows are 0 and must be masked.

    kv_cache [num_layers, 2, num_heads, max_seq_len, head_dim]; or keys and values apart, whose head
    dims may differ.
    """
    keys, values = kv_cache.unbind(1) if isinstance(kv_cache, Tensor) else kv_cache
    return gather_rows(keys, memory_indices), gather_rows(values, memory_indices)


def _score(scores: list[float], position: int) -> float:
    score = scores[position] if position < len(scores) else 0.0
    return -math.inf if math.isnan(score) else score


def _pad(positions: list[int], width: int) -> list[int]:
    return positions + [-1] * (width - len(positions))


def _check_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}")
