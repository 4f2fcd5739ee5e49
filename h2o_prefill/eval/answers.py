"""Greedy answers to questions about long texts, after dense and after sparse prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.prompts import encode_prompt
from h2o_prefill.eval.inputs.text import Corpus, encode
from h2o_prefill.eval.report import build_report
from h2o_prefill.eval.runs import (
    DENSE,
    Progress,
    check_dense,
    check_length,
    chosen_variants,
    count_steps,
    eval_mode,
    generate_greedily,
    prefill_mode,
    with_dense,
)

QUESTION = "Summarize the text above in one sentence."


@dataclass(frozen=True)
class Answer:
    """An answer after sparse prefill, compared with the one after dense prefill."""

    text: str
    # The first token that differs, counted from 0; None if all are the same. Later tokens are not
    # comparable: they answer different prompts.
    parts_at: int | None
    gap: float | None  # how much less likely than its own the dense run holds that token, in nats


@dataclass(frozen=True)
class PromptAnswers:
    """One prompt, and its answers."""

    source: str  # name of the text
    begin: int  # first token of the piece in its text
    prompt_tokens: int
    dense_tokens: int  # of the answer after dense prefill
    dense: str  # that answer
    answers: dict[str, Answer]  # by variant


@dataclass(frozen=True)
class AnswersResult:
    """Answers by a model with dense prefill and with each variant, on the same prompts."""

    prompts: list[PromptAnswers]
    variants: dict[str, PrefillConfig]
    question: str  # empty if the texts were continued
    prompt_tokens: int  # of a piece of text
    new_tokens: int  # of an answer, at most
    text_sources: list[str]

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return how many answers of each variant equal dense, and where the others diverge."""
        found = {}
        for name in self.variants:
            answers = [prompt.answers[name] for prompt in self.prompts]
            parting = sorted(one.parts_at for one in answers if one.parts_at is not None)
            found[name] = {
                "equal": len(answers) - len(parting),
                "prompts": len(answers),
                "parting_tokens": parting,
                "gaps": sorted(one.gap for one in answers if one.gap is not None),
            }
        return found


def answers_report(result: AnswersResult, **origin: Any) -> dict[str, Any]:
    """Return the report of a comparison; `origin` adds what else reproduces it: model, dtype."""
    values = asdict(result)
    prompts = values.pop("prompts")
    return build_report({**origin, **values}, summary=result.summary(), prompts=prompts)


def compare_answers(
    model: nn.Module | str,
    texts: Sequence[Corpus],
    variants: Mapping[str, PrefillConfig] | None = None,
    *,
    tokenizer: Any = None,
    prompts: int = 20,
    prompt_tokens: int = 6000,
    new_tokens: int = 32,
    question: str = QUESTION,
    on_progress: Progress | None = None,
) -> AnswersResult:
    """Answer a question about pieces of text after dense and after each variant of sparse prefill.

    A prompt is a piece of a text followed by the question, in the tokenizer's chat template if it
    has one; with an empty question the piece is continued. The pieces are spread evenly over every
    text, and the texts take turns. Answers are greedy, and decoding is dense over the whole cache.
    `prompt_tokens` does not count the template and the question. Model, tokenizer, variants and
    `on_progress` are as in `evaluate_retrieval`.
    """
    chosen = chosen_variants(variants)
    numbers = {"prompts": prompts, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    network, tokenizer = resolve_model(model, tokenizer)
    check_dense(network)
    asked = [
        (corpus, begin, _prompt(tokenizer, piece, question))
        for corpus, begin, piece in _pieces(tokenizer, texts, prompts, prompt_tokens)
    ]
    longest = max(ids.shape[1] for _, _, ids in asked)
    check_length(network, longest + new_tokens, "prompt_tokens with question and answer")

    runs = with_dense(chosen)
    step = count_steps(on_progress, len(asked) * len(runs))
    found: list[PromptAnswers] = []
    with torch.no_grad(), eval_mode(network):
        for number, (corpus, begin, ids) in enumerate(asked, 1):
            length = ids.shape[1]
            tokens: dict[str, list[int]] = {}
            logits: Sequence[Tensor] = ()
            for name, config in runs.items():
                step(f"prompt {number} {name}")
                options = {"output_logits": name == DENSE, "return_dict_in_generate": True}
                with prefill_mode(network, config, tokenizer=tokenizer, strict=True):
                    made = generate_greedily(network, ids, new_tokens, **options)
                tokens[name] = made.sequences[0, length:].tolist()
                if name == DENSE:
                    logits = made.logits
            dense = tokens[DENSE]
            answers = {name: _compare(tokenizer, tokens[name], dense, logits) for name in chosen}
            text = str(tokenizer.decode(dense, skip_special_tokens=True))
            found.append(PromptAnswers(corpus.name, begin, length, len(dense), text, answers))
    step("done")
    sources = [corpus.source for corpus in texts]
    return AnswersResult(found, chosen, question, prompt_tokens, new_tokens, sources)


def _pieces(
    tokenizer: Any, texts: Sequence[Corpus], prompts: int, prompt_tokens: int
) -> list[tuple[Corpus, int, Tensor]]:
    """Return (text, first token, tokens [prompt_tokens]) of every prompt."""
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    tokens = [encode(tokenizer, corpus.text) for corpus in texts]
    found = []
    for number in range(prompts):
        turn, text = divmod(number, len(texts))
        corpus, whole = texts[text], tokens[text]
        turns = len(range(text, prompts, len(texts)))
        if len(whole) < turns * prompt_tokens:
            raise ValueError(
                f"the text {corpus.name!r} must have {turns} x {prompt_tokens} tokens, got "
                f"{len(whole)}"
            )
        begin = turn * (len(whole) - prompt_tokens) // max(1, turns - 1)
        found.append((corpus, begin, whole[begin : begin + prompt_tokens]))
    return found


def _prompt(tokenizer: Any, piece: Tensor, question: str) -> Tensor:
    """Return the token ids of a prompt, int64 [1, T]."""
    if not question:
        return piece.unsqueeze(0)
    return encode_prompt(tokenizer, f"{tokenizer.decode(piece)}\n\n{question}", chat=True)


def _compare(
    tokenizer: Any, tokens: list[int], dense: list[int], logits: Sequence[Tensor]
) -> Answer:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    pairs = zip(tokens, dense, strict=False)
    parts_at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if parts_at is None:
        return Answer(text, None, None)
    row = logits[parts_at][0].float()
    return Answer(text, parts_at, float(row[dense[parts_at]] - row[tokens[parts_at]]))
