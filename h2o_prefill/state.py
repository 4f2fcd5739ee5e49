"""The state of one layer between two calls of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_prefill.config import PrefillConfig

# Columns of the errors of a layer, see `PrefillState.errors`.
DOUBLINGS, ERROR_SUM, CHUNKS, FACTOR_SUM = range(4)

# Nats a token for each unit of relative error, summed over layers, with and without recall, which
# leaves less important keys to be missed. Of SmolLM2-135M: the log of experiments has the fit.
_KL_PER_ERROR = {True: 0.062, False: 0.17}


def estimated_kl(errors: Sequence[Tensor], config: PrefillConfig) -> Tensor:
    """Estimate how much sparse prefill changes the predictions of a prompt.

    The sum over layers of the mean error of their heads, times a constant: errors add up along the
    residual stream. The constant was fitted on prose and one model, where single prompts are within
    a factor of 1.5. The estimate reads low for prompts in which evicted passages come again in
    another form: such rows are few, and measured rows miss them.

    Parameters
    ----------
    errors : sequence of Tensor
        float32 [B, Hkv, 4] of each layer, as `PrefillState.errors`.
    config : PrefillConfig
        Settings of the prefill.

    Returns
    -------
    Tensor
        float64 [B]: mean KL(dense || sparse) of the next-token distributions, nats a token; 0 for a
        row of one chunk, which is exact, and NaN where the settings measure no errors.
    """
    means = torch.stack([x.double().cpu().mean(1) for x in errors])  # [layers, B, 4]
    chunks = means[..., CHUNKS]
    error = (means[..., ERROR_SUM] / chunks.clamp(min=1)).sum(0)
    most = chunks.amax(0)
    # The first chunk of a prompt is exact.
    share = most / (most + 1) if config.error_rows else torch.nan
    return _KL_PER_ERROR[config.recall > 0] * share * error


def score_dtype(key: Tensor) -> torch.dtype:
    """Return the dtype of scores and lse: float32, or float64 for float64 keys."""
    return torch.float64 if key.dtype == torch.float64 else torch.float32


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
        H have doubled, the sum of its errors, their number, and the sum of the factors of L and H
        in these chunks.
    """

    scores: Tensor
    memory: Tensor
    length: int
    last_chunk_begin: int
    errors: Tensor

    @property
    def fields(self) -> tuple[Tensor, Tensor, int, Tensor]:
        """Scores, memory, last_chunk_begin and errors: the state as operators take it."""
        return self.scores, self.memory, self.last_chunk_begin, self.errors

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
        cut = replace(self, scores=self.scores[..., :length], length=length)
        if length <= self.last_chunk_begin:
            memory = torch.full_like(self.memory, -1)
            return replace(cut, memory=memory, last_chunk_begin=0)
        return cut

    def map(self, change: Callable[[Tensor], Tensor]) -> PrefillState:
        """Return a state with every tensor changed."""
        scores, memory, errors = map(change, (self.scores, self.memory, self.errors))
        return replace(self, scores=scores, memory=memory, errors=errors)

    def clone(self) -> PrefillState:
        """Return a copy that shares no tensors."""
        return self.map(torch.clone)


@dataclass
class Checkpoint:
    """What the chunk after a multiple of the chunk size needs of the prompt before it.

    Attributes
    ----------
    memory : Tensor
        int32 [B, Hkv, any]: the next chunk's memory set, ascending, then -1.
    scores : Tensor
        float32, like `memory`: attention that its positions received so far, 0 where it is -1.
    errors : Tensor
        float32 [B, Hkv, 4], as `PrefillState.errors`.
    """

    memory: Tensor
    scores: Tensor
    errors: Tensor

    def state(self, length: int) -> PrefillState:
        """Return the state of a prompt of `length` tokens, at whose end this was taken.

        Positions outside of the memory set are no candidates any more, and have score 0.
        """
        scores = self.scores.new_zeros(*self.memory.shape[:2], length)
        scores.scatter_add_(2, self.memory.clamp(min=0).long(), self.scores)
        return PrefillState(scores, self.memory.clone(), length, length, self.errors.clone())


def empty_checkpoints(count: int, state: PrefillState, size: int) -> list[Tensor]:
    """Return tensors for the operators to write `count` checkpoints of a layer into.

    `state` tells their kinds, and `size` is `PrefillConfig.memory_size` of the layer.
    """
    shape = count, *state.errors.shape[:2]
    memory = state.memory.new_empty(*shape, size)
    return [memory, state.scores.new_empty(*shape, size), state.errors.new_empty(*shape, 4)]


def with_room(memory: Tensor, size: int) -> Tensor:
    """Return memory sets [B, Hkv, M] with room for `size` positions or more, -1 where absent."""
    absent = size - memory.shape[2]
    return pad(memory, (0, absent), value=-1) if absent > 0 else memory


def empty_state(key: Tensor) -> PrefillState:
    """Return the state of a layer with keys [B, Hkv, T, D] before its first sparse call."""
    scores = key.new_empty((*key.shape[:2], 0), dtype=score_dtype(key))
    return PrefillState(scores, scores.int(), 0, 0, no_errors(key))
