"""Scores of the tokens of a window, and perplexities and errors from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_prefill.eval.forward import PromptLogits

# A slice's fp32 logits hold at most this many numbers (32 MiB).
_SLICE_NUMBERS = 1 << 23

# Neighbouring tokens are not independent; blocks of this many are assumed to be.
BLOCK_TOKENS = 128


class WindowScores(NamedTuple):
    """Scores of the scored rows of a window, fp32 [rows] each, on the CPU."""

    dense_nll: Tensor  # -log p(next token), nats
    sparse_nll: Tensor
    kl: Tensor  # KL(dense || sparse) of the next-token distributions, nats
    same_top1: Tensor  # bool: whether both runs have the same most likely token

    def check_finite(self, what: str) -> None:
        """Raise ArithmeticError, which names `what` was run, if scores are not finite."""
        for name, nll in (("dense", self.dense_nll), ("sparse", self.sparse_nll)):
            if not bool(nll.isfinite().all()):
                raise ArithmeticError(f"the {name} run of {what} gave logits that are not finite")


def score_window(
    dense: PromptLogits, sparse: PromptLogits, input_ids: Tensor, rows: range
) -> WindowScores:
    """Score rows of a window, each on the next token, in slices of bounded memory."""
    if not rows:
        raise ValueError(f"a window must hold a token to score, got a length of {len(input_ids)}")
    parts: list[tuple[Tensor, ...]] = []
    runs = (_log_probs(logits, input_ids, rows) for logits in (dense, sparse))
    for (log_p, dense_nll), (log_q, sparse_nll) in zip(*runs, strict=True):
        # where, not a product: a token of probability 0 contributes 0, also if its log is -inf in
        # both.
        terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
        same = log_p.argmax(dim=-1) == log_q.argmax(dim=-1)
        parts.append((dense_nll, sparse_nll, terms.sum(dim=-1), same))
    return WindowScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def token_nll(logits: PromptLogits, input_ids: Tensor, rows: range) -> Tensor:
    """Return -log p(next token) of the rows of one run, in nats, fp32 [rows], on the CPU."""
    return torch.cat([nll for _, nll in _log_probs(logits, input_ids, rows)]).cpu()


def _log_probs(
    logits: PromptLogits, input_ids: Tensor, rows: range
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log p [slice, vocabulary] and -log p of the next tokens [slice], slice by slice."""
    step = max(1, _SLICE_NUMBERS // logits.slice(rows.start, rows.start + 1).shape[-1])
    for begin in range(rows.start, rows.stop, step):
        end = min(begin + step, rows.stop)
        log_p = torch.log_softmax(logits.slice(begin, end), dim=-1)
        yield log_p, -log_p.gather(1, input_ids[begin + 1 : end + 1].unsqueeze(1)).squeeze(1)


def perplexity(nll: Tensor) -> float:
    """Return exp of the mean of per-token NLL (nats), of any shape."""
    return math.exp(nll.double().mean().item())


def relative_difference(dense: Tensor, sparse: Tensor) -> tuple[float, float]:
    """Return the percentage of the sparse perplexity above the dense one, and its standard error.

    The two run over the same tokens, and so the differences are paired: with d_u the mean of
    `sparse - dense` over unit u, the difference is 100 (exp(mean d) - 1) and its error, by the
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
