"""Per-token scores of one window: likelihood of the next token in each run, and KL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_prefill.eval.forward import PromptLogits

# A slice's fp32 logits hold at most this many numbers (32 MiB).
_SLICE_NUMBERS = 1 << 23


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
    parts: list[tuple[Tensor, ...]] = []
    for begin, end in _slices(dense, rows):
        log_p = torch.log_softmax(dense.slice(begin, end), dim=-1)
        log_q = torch.log_softmax(sparse.slice(begin, end), dim=-1)
        # where, not a product: a token of probability 0 contributes 0, also if its log is -inf in
        # both.
        terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
        parts.append(
            (
                _next_token_nll(log_p, input_ids, begin),
                _next_token_nll(log_q, input_ids, begin),
                terms.sum(dim=-1),
                log_p.argmax(dim=-1) == log_q.argmax(dim=-1),
            )
        )
    return WindowScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def token_nll(logits: PromptLogits, input_ids: Tensor, rows: range) -> Tensor:
    """Return -log p(next token) of the rows of one run, in nats, fp32 [rows], on the CPU."""
    parts = [
        _next_token_nll(torch.log_softmax(logits.slice(begin, end), dim=-1), input_ids, begin)
        for begin, end in _slices(logits, rows)
    ]
    return torch.cat(parts).cpu()


def _slices(logits: PromptLogits, rows: range) -> Iterator[tuple[int, int]]:
    vocabulary = logits.slice(rows.start, rows.start + 1).shape[-1]
    step = max(1, _SLICE_NUMBERS // vocabulary)
    for begin in range(rows.start, rows.stop, step):
        yield begin, min(begin + step, rows.stop)


def _next_token_nll(log_p: Tensor, input_ids: Tensor, begin: int) -> Tensor:
    target = input_ids[begin + 1 : begin + 1 + len(log_p)].unsqueeze(1)
    return -log_p.gather(1, target).squeeze(1)
