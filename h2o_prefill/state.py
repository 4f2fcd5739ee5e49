"""The state of one layer between two calls of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Nats a token for each unit of relative error, summed over layers. Of SmolLM2-135M; the log of
# experiments has the fit, and how far single prompts are from it.
_KL_PER_ERROR = 1.0


def estimated_kl(errors: Sequence[Tensor]) -> Tensor:
    """Estimate what sparse prefill changes in the predictions of a prompt.

    Parameters
    ----------
    errors : sequence of Tensor
        float32 [B, Hkv, 4] of each layer, as `PrefillState.errors`.

    Returns
    -------
    Tensor
        float64 [B]: mean KL(dense || sparse) of the next-token distributions, nats a token; NaN
        where no error was measured. The sum over layers of the mean error of their heads, times a
        constant: errors add up along the residual stream. It was fitted on ordinary prose and one
        model, is within a factor of 1.5 there, and reads low for prompts whose evicted passages
        come again in another form.
    """
    totals, numbers = (
        torch.stack([x[..., i].double().cpu().mean(1) for x in errors]) for i in (1, 2)
    )
    chunks = numbers.amax(0)
    by_layer = totals / numbers.clamp(min=1)
    # The first chunk of a prompt is exact.
    return (
        _KL_PER_ERROR * by_layer.sum(0) * torch.where(chunks > 0, chunks / (chunks + 1), torch.nan)
    )


def no_errors(key: Tensor) -> Tensor:
    """Return the errors of a layer with keys [B, Hkv, T, D] before any is measured."""
    return key.new_zeros((*key.shape[:2], 4), dtype=torch.float32)


@dataclass
class PrefillState:
    """Scores, memory set and errors of one layer: plain tensors, safe to copy, pickle and save.

    Attributes
    ----------
    scores : Tensor
        float32 [B, Hkv, length]: attention that each position received so far.
    memory : Tensor
        int32 [B, Hkv, `PrefillConfig.memory_size`]: the set that the last sparse chunk attended to,
        ascending, then -1.
    length : int
        Number of tokens that the scores cover.
    last_chunk_begin : int
        Where the last sparse chunk began. Its tokens and `memory` are the candidates for the next
        memory set.
    errors : Tensor
        float32 [B, Hkv, 4]: what `error_rows` measured so far. For each head, how often its L and
        H have doubled (-1: the layer is dense since), the sum of its errors, their number, and the
        sum of the factors of L and H in these chunks.
    """

    scores: Tensor
    memory: Tensor
    length: int
    last_chunk_begin: int
    errors: Tensor

    def truncated(self, length: int) -> PrefillState | None:
        """Return the state of the first `length` tokens, None if there are none.

        Scores of the remaining tokens do not change: contributions of removed queries cannot be
        separated. A cut inside the last chunk keeps the memory set, whose positions precede that
        chunk. A cut before it empties the set, and every remaining token is a candidate again.
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
            errors=self.errors,
        )

    def clone(self) -> PrefillState:
        """Return a copy that shares no tensors."""
        return PrefillState(
            self.scores.clone(),
            self.memory.clone(),
            self.length,
            self.last_chunk_begin,
            self.errors.clone(),
        )
