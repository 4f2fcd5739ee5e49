"""Perplexities and their errors from the negative log-likelihood of every scored token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Neighbouring tokens are not independent; blocks of this many are assumed to be.
BLOCK_TOKENS = 128


def perplexity(nll: Tensor) -> float:
    """Return exp of the mean of per-token NLL (nats), of any shape."""
    return math.exp(nll.double().mean().item())


def perplexity_error(nll: Tensor) -> float:
    """Return the standard error of a perplexity, with tokens taken as independent.

    ppl * sqrt((E[nll^2] - E[nll]^2) / (count - 1)), as llama.cpp's tools/perplexity prints it.
    """
    values = nll.double().flatten()
    if len(values) < 2:
        return math.nan
    return perplexity(nll) * math.sqrt(values.var(correction=0).item() / (len(values) - 1))


def relative_difference(dense: Tensor, sparse: Tensor) -> tuple[float, float]:
    """Return the percentage of the sparse perplexity above the dense one, and its standard error.

    The two run over the same tokens, so the error is that of paired differences: with d_u the mean
    of `sparse - dense` over unit u, the difference is 100 (exp(mean d) - 1) and its error, by the
    delta method, 100 exp(mean d) std(d, n - 1) / sqrt(n). Units are windows; with one window, its
    blocks of `BLOCK_TOKENS` tokens; NaN for fewer than two. (The shared text cancels: this is far
    smaller than the error of either perplexity.) NLL in nats, [windows, scored tokens].
    """
    difference = (sparse.double() - dense.double()).contiguous()
    ratio = math.exp(difference.mean().item())
    units = difference.mean(dim=1)
    if len(units) == 1:
        units = torch.stack([block.mean() for block in difference[0].split(BLOCK_TOKENS)])
    error = math.nan
    if len(units) > 1:
        error = units.std(correction=1).item() / math.sqrt(len(units))
    return 100 * (ratio - 1), 100 * ratio * error


def format_change(percent: float, error: float | None = None) -> str:
    """Return a signed percentage, without a sign if it rounds to zero from below."""
    known = error is not None and not math.isnan(error)
    return f"{round(percent, 2) + 0.0:+.2f} %" + (f" ± {error:.2f}" if known else "")


def binned_perplexity(nll: Tensor, bins: Tensor, count: int) -> list[float | None]:
    """Return the perplexity of the tokens of each bin, None if empty; bin -1 is left out."""
    result: list[float | None] = []
    for index in range(count):
        chosen = nll[:, bins == index]
        result.append(perplexity(chosen) if chosen.numel() else None)
    return result
