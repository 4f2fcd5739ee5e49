"""Task 3 of the method: how much attention each position has received.

A position is scored twice over. Its own chunk gives it a first score; after that every chunk that
holds it in its memory set votes once, after its attention, not token by token. Scores never fall.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ScoreTracker:
    """Manage per-token importance scores for heavy hitter selection.

    Weights may have more rows than the chunk has tokens: with grouped queries the G query heads of
    a KV head count as G times as many queries.

    Parameters
    ----------
    num_layers, num_heads, max_seq_len : int
        `num_heads` counts KV heads.
    dtype, device
        Of the scores.

    Attributes
    ----------
    scores : Tensor
        [num_layers, num_heads, max_seq_len], 0 where nothing was scored yet.
    num_updates : list of int
        Per layer, how many chunks have voted.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.scores = torch.zeros(num_layers, num_heads, max_seq_len, dtype=dtype, device=device)
        self.num_updates = [0] * num_layers

    def set_initial_scores(
        self, layer_idx: int, chunk_start: int, chunk_end: int, intra_attention_weights: Tensor
    ) -> None:
        """Set the first scores of a chunk: the column sums of its own attention.

        Parameters
        ----------
        layer_idx : int
        chunk_start, chunk_end : int
            The chunk is [chunk_start, chunk_end).
        intra_attention_weights : Tensor
            [num_heads, queries, chunk_end - chunk_start], after the softmax, 0 where masked.

        Raises
        ------
        ValueError
            If the weights do not have one column per token, or the chunk leaves the buffer.
        """
        max_seq_len = self.scores.shape[2]
        if chunk_end > max_seq_len:
            raise ValueError(f"chunk_end must be <= max_seq_len ({max_seq_len}), got {chunk_end}")
        columns = intra_attention_weights.shape[-1]
        if columns != chunk_end - chunk_start:
            raise ValueError(
                f"intra_attention_weights must have {chunk_end - chunk_start} columns, "
                f"got {columns}"
            )
        sums = intra_attention_weights.detach().sum(dim=-2)  # a selection has no gradient
        self.scores[layer_idx, :, chunk_start:chunk_end] = sums

    def accumulate_scores(
        self, layer_idx: int, memory_indices: Tensor, inter_attention_weights: Tensor
    ) -> None:
        """Add a chunk's votes for its memory set: the column sums of its inter-chunk attention.

        Parameters
        ----------
        layer_idx : int
        memory_indices : Tensor
            int32 [num_heads, M], distinct per head, -1 where absent.
        inter_attention_weights : Tensor
            [num_heads, queries, M], after the softmax. Columns of absent positions are ignored.
        """
        votes = inter_attention_weights.detach().sum(dim=-2).masked_fill(memory_indices < 0, 0)
        self.scores[layer_idx].scatter_add_(
            -1, memory_indices.long().clamp(min=0), votes.to(self.scores.dtype)
        )
        self.num_updates[layer_idx] += 1

    def get_scores(self, layer_idx: int, indices: Tensor | list[set[int]]) -> Tensor:
        """Look up the scores of candidates.

        Parameters
        ----------
        layer_idx : int
        indices : Tensor or list of set of int
            [num_heads, num_candidates], -1 where absent; or one set per head, looked up in
            ascending order.

        Returns
        -------
        Tensor
            [num_heads, num_candidates], -inf where a head has no such candidate, so that it never
            wins.
        """
        if not isinstance(indices, Tensor):
            longest = max((len(head) for head in indices), default=0)
            rows = [sorted(head) + [-1] * (longest - len(head)) for head in indices]
            indices = torch.tensor(rows, dtype=torch.int32, device=self.scores.device)
            indices = indices.reshape(len(rows), longest)
        found = self.scores[layer_idx].gather(-1, indices.long().clamp(min=0))
        return found.masked_fill(indices < 0, -torch.inf)

    def reset(self) -> None:
        """Forget the prompt."""
        self.scores.zero_()
        self.num_updates = [0] * len(self.num_updates)
