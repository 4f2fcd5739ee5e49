"""What a comparison of answers found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.report import build_report


@dataclass(frozen=True)
class Answer:
    """An answer after sparse prefill, beside the one after dense prefill.

    Attributes
    ----------
    text : str
    parts_at : int or None
        The first token that is another one, counted from 0; None if all are the same. Up to
        there both prefills were asked the same, behind it they answer different prompts.
    gap : float or None
        How much less likely the dense run holds that token than its own, in nats.
    """

    text: str
    parts_at: int | None
    gap: float | None


@dataclass(frozen=True)
class PromptAnswers:
    """One prompt, and its answers.

    Attributes
    ----------
    source : str
        Name of the text.
    begin : int
        First token of the piece in its text.
    prompt_tokens, dense_tokens : int
        Of the prompt, and of the answer after dense prefill.
    dense : str
        That answer.
    answers : dict of str to Answer
        By variant.
    """

    source: str
    begin: int
    prompt_tokens: int
    dense_tokens: int
    dense: str
    answers: dict[str, Answer]


@dataclass(frozen=True)
class AnswersResult:
    """Answers by a model with dense prefill and with each variant, on the same prompts.

    Attributes
    ----------
    prompts : list of PromptAnswers
    variants : dict of str to PrefillConfig
    question : str
        Empty if the texts were continued.
    prompt_tokens, new_tokens : int
        Tokens of a piece of text, and of an answer at most.
    text_sources : list of str
    """

    prompts: list[PromptAnswers]
    variants: dict[str, PrefillConfig]
    question: str
    prompt_tokens: int
    new_tokens: int
    text_sources: list[str]

    def equal(self, variant: str) -> int:
        """Return how many answers of a variant equal those after dense prefill."""
        return sum(prompt.answers[variant].parts_at is None for prompt in self.prompts)

    def parting_tokens(self, variant: str) -> list[int]:
        """Return at which token the other answers part from dense, ascending, counted from 0."""
        places = (prompt.answers[variant].parts_at for prompt in self.prompts)
        return sorted(place for place in places if place is not None)

    def gaps(self, variant: str) -> list[float]:
        """Return `Answer.gap` of those answers, ascending."""
        gaps = (prompt.answers[variant].gap for prompt in self.prompts)
        return sorted(gap for gap in gaps if gap is not None)


def answers_report(result: AnswersResult, **origin: Any) -> dict[str, Any]:
    """Return what `report.write_json` makes the file of a comparison from.

    Parameters
    ----------
    result : AnswersResult
    origin
        What the result does not know and a reader needs to repeat it: model, dtype.

    Returns
    -------
    dict
        `{environment, config, summary: {variant: {equal, prompts, parting_tokens, gaps}},
        prompts: [...]}`
    """
    values = asdict(result)
    prompts = values.pop("prompts")
    summary = {
        name: {
            "equal": result.equal(name),
            "prompts": len(prompts),
            "parting_tokens": result.parting_tokens(name),
            "gaps": result.gaps(name),
        }
        for name in result.variants
    }
    return build_report({**origin, **values}, summary=summary, prompts=prompts)
