"""What an evaluation of retrieval found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.needles.prompts import PromptKey
from h2o_prefill.eval.report import build_report


@dataclass(frozen=True)
class PromptOutcome(PromptKey):
    """One prompt (`PromptKey`), and what came of it.

    Attributes
    ----------
    prompt_tokens : int
    answers : tuple of str
        What was expected.
    outputs : dict of str to str
        What "dense" and each variant said.
    scores : dict of str to float
        The share of answers that it holds.
    """

    prompt_tokens: int
    answers: tuple[str, ...]
    outputs: dict[str, str]
    scores: dict[str, float]


@dataclass(frozen=True)
class RetrievalSummary:
    """One variant on the prompts of one task and length.

    Attributes
    ----------
    task : str
    length : int
    variant : str
        "dense", or a variant's name.
    prompts : int
    accuracy : float
        Mean score.
    accuracy_interval : (float, float)
        Its 95 % interval, see `scoring.wilson_interval`.
    dense_solved : int
        Prompts of which the dense run found every answer.
    kept : float
        The share of those of which the variant found every answer too; NaN if there are none. A
        prompt that the model fails with dense attention says nothing about the variant.
    kept_interval : (float, float)
        Its 95 % interval.
    """

    task: str
    length: int
    variant: str
    prompts: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    dense_solved: int
    kept: float
    kept_interval: tuple[float, float]


@dataclass(frozen=True)
class RetrievalResult:
    """Retrieval by a model with dense prefill and with each variant, on the same prompts.

    Attributes
    ----------
    outcomes : list of PromptOutcome
    summary : list of RetrievalSummary
        By task, length and variant, "dense" first.
    variants : dict of str to PrefillConfig
    question : str
        "last" or "first".
    prompts_per_cell : int
        Prompts of each task, length and depth.
    seed : int
    text_source : str
        What the needles were hidden in.
    """

    outcomes: list[PromptOutcome]
    summary: list[RetrievalSummary]
    variants: dict[str, PrefillConfig]
    question: str
    prompts_per_cell: int
    seed: int
    text_source: str

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dicts, lists, tuples and numbers."""
        return asdict(self)


def retrieval_report(result: RetrievalResult, **origin: Any) -> dict[str, Any]:
    """Return what `report.write_json` makes the file of an evaluation from.

    Parameters
    ----------
    result : RetrievalResult
    origin
        What the result does not know and a reader needs to repeat it: model, dtype.

    Returns
    -------
    dict
        `{environment, config, summary: [...], prompts: [...]}`
    """
    values = result.to_dict()
    summary, prompts = values.pop("summary"), values.pop("outcomes")
    return build_report({**origin, **values}, summary=summary, prompts=prompts)
