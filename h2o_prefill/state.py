"""What one layer carries from one call of a prompt to the next."""

from __future__ import annotations

from dataclasses import dataclass

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
