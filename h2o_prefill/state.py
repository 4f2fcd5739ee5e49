"""What one layer carries from one call of a prompt to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PrefillState:
    """Scores and memory set of one layer: plain tensors, safe to copy, pickle and save.

    Attributes
    ----------
    scores : Tensor
        fp32 [B, Hkv, length]: attention that each position received so far.
    memory : Tensor
        int32 [B, Hkv, K + L + H]: the set that the last sparse chunk attended to, ascending, -1
        where absent.
    length : int
        Tokens that the scores cover.
    last_chunk_begin : int
        Where the last sparse chunk began; with `memory` the candidates of the next memory set.
    """

    scores: Tensor
    memory: Tensor
    length: int
    last_chunk_begin: int

    def truncated(self, length: int) -> PrefillState | None:
        """Return the state cut to the first tokens: nothing in it refers to a removed position.

        The scores of the tokens that stay are kept as they are: what removed queries added cannot
        be told apart. A cut inside the last chunk leaves the memory set alone, since all of it lies
        before that chunk. A cut before it removes what the set was chosen for, so the set is
        emptied and every token that stays is a candidate again.

        Parameters
        ----------
        length : int
            Tokens that stay.

        Returns
        -------
        PrefillState or None
            None if no token stays.
        """
        if length <= 0:
            return None
        if length >= self.length:
            return self
        inside = length > self.last_chunk_begin
        return PrefillState(
            scores=self.scores[..., :length],
            memory=self.memory if inside else torch.full_like(self.memory, -1),
            length=length,
            last_chunk_begin=self.last_chunk_begin if inside else 0,
        )

    def clone(self) -> PrefillState:
        """Return a copy with tensors of its own."""
        return PrefillState(
            self.scores.clone(), self.memory.clone(), self.length, self.last_chunk_begin
        )
