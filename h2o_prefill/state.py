"""The state of one layer of a prompt, and what it tells of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_prefill.config import PrefillConfig

# What one layer knows of one prompt: a class of C++, which TorchScript has as well.
LayerState: Any = torch.classes.h2o_prefill.LayerState

# Columns of the errors of a layer, float32 [B, Hkv, 4]: how often L and H of the head have doubled,
# the sum of its errors, their number, and the sum of the factors of L and H in these chunks.
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
        float32 [B, Hkv, 4] of each layer, as `LayerState.errors`.
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


def with_room(memory: Tensor, size: int) -> Tensor:
    """Return memory sets [B, Hkv, M] with room for `size` positions or more, -1 where absent."""
    absent = size - memory.shape[2]
    return pad(memory, (0, absent), value=-1) if absent > 0 else memory
