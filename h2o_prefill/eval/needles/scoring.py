"""Scores of retrieval answers, and what they say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from h2o_prefill.eval.needles.result import PromptOutcome, RetrievalSummary

DENSE = "dense"

# The normal quantile of 95 %.
_Z = statistics.NormalDist().inv_cdf(0.975)


def substring_score(output: str, answers: Sequence[str]) -> float:
    """Return the share of answers that an output holds, in whatever case.

    RULER's `string_match_all` (NVIDIA/RULER, scripts/eval/synthetic/constants.py).
    """
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share.

    Wilson (1927), "Probable inference, the law of succession, and statistical inference":
    (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). For a mean of values between 0 and 1
    that are not only 0 and 1 it is too wide, if anything: none of those has a larger variance than
    p (1 - p).

    Parameters
    ----------
    share : float
        p, between 0 and 1.
    count : int
        n, what it is a share of. With none, the bounds are NaN.
    """
    if count == 0:
        return math.nan, math.nan
    square = _Z * _Z / count
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    middle = share + square / 2
    # Rounding may leave the ends of 0 and 1 a hair outside.
    low = max(0.0, (middle - half) / (1 + square))
    return low, min(1.0, (middle + half) / (1 + square))


def summarize_retrieval(
    outcomes: Sequence[PromptOutcome], variants: Sequence[str]
) -> list[RetrievalSummary]:
    """Return the accuracy of each variant, by task and length.

    Parameters
    ----------
    outcomes : sequence of PromptOutcome
    variants : sequence of str
        Which to summarise, of those that ran.
    """
    groups: dict[tuple[str, int], list[PromptOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task, outcome.length), []).append(outcome)
    return [
        _summary(task, length, name, group)
        for (task, length), group in groups.items()
        for name in variants
    ]


def _summary(
    task: str, length: int, variant: str, outcomes: Sequence[PromptOutcome]
) -> RetrievalSummary:
    accuracy = statistics.fmean(outcome.scores[variant] for outcome in outcomes)
    solved = [outcome.scores[variant] == 1 for outcome in outcomes if outcome.scores[DENSE] == 1]
    kept = sum(solved) / len(solved) if solved else math.nan
    return RetrievalSummary(
        task=task,
        length=length,
        variant=variant,
        prompts=len(outcomes),
        accuracy=accuracy,
        accuracy_interval=wilson_interval(accuracy, len(outcomes)),
        dense_solved=len(solved),
        kept=kept,
        kept_interval=wilson_interval(kept, len(solved)),
    )
