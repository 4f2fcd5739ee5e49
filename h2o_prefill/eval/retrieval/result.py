"""Scores of retrieval answers: summary, report and figure."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.report import build_report
from h2o_prefill.generation.json_lines import whole_lines
from h2o_prefill.generation.runs import DENSE

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class PromptOutcome:
    """One prompt, what was expected, and what "dense" and each variant answered."""

    task: str
    length: int  # tokens of prompt and answer together, at most
    depth: float  # percent of the text before the needle
    seed: int  # of `build_prompt`
    prompt_tokens: int
    answers: tuple[str, ...]
    outputs: dict[str, str]
    scores: dict[str, float]  # `substring_score` of the outputs
    # Mean log-probability per token of the answers, in nats, whatever was said.
    log_probs: dict[str, float]


@dataclass(frozen=True)
class RetrievalSummary:
    """ "dense" or one variant on the prompts of one task and length; intervals are of 95 %."""

    task: str
    length: int
    variant: str
    prompts: int
    accuracy: float  # mean score
    accuracy_interval: tuple[float, float]
    dense_solved: int  # prompts of which the dense run found every answer
    # The share of those of which the variant found every answer too, NaN if there are none: a
    # prompt that the model fails with dense attention says nothing about the variant.
    kept: float
    kept_interval: tuple[float, float]
    log_prob: float  # of the answers, per token, mean of the prompts, nats
    log_prob_change: float  # from dense, mean of the prompts
    log_prob_stderr: float  # its standard error, of paired differences; NaN for one prompt


@dataclass(frozen=True)
class RetrievalResult:
    """Retrieval by a model with dense prefill and with each variant, on the same prompts."""

    outcomes: list[PromptOutcome]
    summary: list[RetrievalSummary]  # by task, length and variant, "dense" first
    variants: dict[str, PrefillConfig]
    select: str | None  # the name of the selection rule of the variants, None if there is none
    question: str
    prompts_per_cell: int  # prompts of each task, length and depth
    seed: int
    text_source: str  # what the needles were hidden in


class KeptOutcomes:
    """A file of JSON lines that keeps outcomes as they come, for a run that goes on with the rest.

    Lines of other prompts, models or settings are left alone. Raises ValueError if the file holds
    anything else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).expanduser()
        self._found: dict[str, PromptOutcome] = {}
        held = self._path.read_bytes() if self._path.exists() else b""
        try:
            lines = whole_lines(held, b'{"key": ')
            for line in lines.splitlines():
                fields = json.loads(line)
                key = fields.pop("key")
                fields["answers"] = tuple(fields["answers"])
                self._found[key] = PromptOutcome(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} must hold outcomes of this command alone") from error
        with self._path.open("ab") as file:
            file.truncate(len(lines))

    def get(self, key: str) -> PromptOutcome | None:
        """Return the outcome of a key, if there is one."""
        return self._found.get(key)

    def add(self, key: str, outcome: PromptOutcome) -> None:
        """Write an outcome."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **asdict(outcome)}) + "\n")


def retrieval_report(result: RetrievalResult, **origin: Any) -> dict[str, Any]:
    """Return the report of an evaluation; `origin` adds what else reproduces it: model, dtype."""
    values = asdict(result)
    summary, prompts = values.pop("summary"), values.pop("outcomes")
    return build_report({**origin, **values}, summary=summary, prompts=prompts)


def substring_score(output: str, answers: Sequence[str]) -> float:
    """Return the share of answers that an output contains, ignoring case.

    RULER's `string_match_all` (NVIDIA/RULER, scripts/eval/synthetic/constants.py).
    """
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `count`, NaN for a count of 0.

    Wilson (1927), "Probable inference, the law of succession, and statistical inference":
    (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). For a mean of values in 0 .. 1 it is
    conservative: their variance is at most p (1 - p).
    """
    if count == 0:
        return math.nan, math.nan
    z = statistics.NormalDist().inv_cdf(0.975)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    middle, whole = share + z * z / (2 * count), 1 + z * z / count
    # Rounding may exceed 0 and 1 by an ulp.
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def summarize_retrieval(
    outcomes: Sequence[PromptOutcome], variants: Sequence[str]
) -> list[RetrievalSummary]:
    """Return the accuracy of each variant by task and length, whose outcomes follow each other."""
    rows = []
    for (task, length), group in itertools.groupby(outcomes, lambda o: (o.task, o.length)):
        outcomes_here = list(group)
        scores = [outcome.scores for outcome in outcomes_here]
        log_probs = [outcome.log_probs for outcome in outcomes_here]
        for variant in variants:
            accuracy = statistics.fmean(score[variant] for score in scores)
            solved = [score[variant] == 1 for score in scores if score[DENSE] == 1]
            changes = [one[variant] - one[DENSE] for one in log_probs]
            deviation = statistics.stdev(changes) if len(changes) > 1 else math.nan
            kept = sum(solved) / len(solved) if solved else math.nan
            rows.append(
                RetrievalSummary(
                    task=task,
                    length=length,
                    variant=variant,
                    prompts=len(scores),
                    accuracy=accuracy,
                    accuracy_interval=wilson_interval(accuracy, len(scores)),
                    dense_solved=len(solved),
                    kept=kept,
                    kept_interval=wilson_interval(kept, len(solved)),
                    log_prob=statistics.fmean(one[variant] for one in log_probs),
                    log_prob_change=statistics.fmean(changes),
                    log_prob_stderr=deviation / math.sqrt(len(changes)),
                )
            )
    return rows
