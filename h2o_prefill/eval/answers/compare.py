"""Greedy answers to questions about long texts, after dense and after sparse prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.answers.result import Answer, AnswersResult, PromptAnswers
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.prompts import encode_prompt
from h2o_prefill.eval.inputs.text import Corpus, encode
from h2o_prefill.eval.runs import (
    Progress,
    check_dense,
    check_length,
    eval_mode,
    prefill_mode,
    report_progress,
)
from h2o_prefill.presets import DEFAULT_PRESET, chosen_config

QUESTION = "Summarize the text above in one sentence."


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
    """Answer a question about pieces of text, with dense prefill and with each sparse variant.

    A prompt is a piece of a text and the question behind it, in the tokenizer's chat template if it
    has one; with an empty question the piece is continued. The pieces are spread evenly over every
    text, and the texts take turns. Answers are greedy, and decoding is dense over the whole cache.

    Parameters
    ----------
    model : PreTrainedModel or str
        A causal language model with dense attention, or a name that `load_model` knows.
    texts : sequence of Corpus
        What the pieces are taken from.
    variants : mapping of str to PrefillConfig, optional
        Names and settings of the sparse runs. Default: that of `enable`, by its name.
    tokenizer : optional
        The model's. A model given by name brings its own.
    prompts : int
        Prompts in all.
    prompt_tokens : int
        Tokens of each piece; the template and the question come on top.
    new_tokens : int
        Tokens of an answer, at most.
    question : str
        Text that follows every piece.
    on_progress : callable, optional
        Called with (answers done, answers in all, what runs next).

    Returns
    -------
    AnswersResult

    Raises
    ------
    ValueError
        If an argument is out of its range, a text is too short, or the model already runs sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    """
    chosen = {DEFAULT_PRESET: chosen_config(None)} if variants is None else dict(variants)
    check_answers(prompts, prompt_tokens, new_tokens)
    network, tokenizer = resolve_model(model, tokenizer)
    if tokenizer is None:
        raise ValueError("tokenizer must be given with a model that is not given by name")
    check_dense(network)
    asked = [
        (corpus, begin, _prompt(tokenizer, piece, question))
        for corpus, begin, piece in _pieces(tokenizer, texts, prompts, prompt_tokens)
    ]
    longest = max(ids.shape[1] for _, _, ids in asked)
    check_length(network, longest + new_tokens, "prompt_tokens with question and answer")

    total = len(asked) * (1 + len(chosen))
    found: list[PromptAnswers] = []
    with torch.no_grad(), eval_mode(network):
        for number, (corpus, begin, ids) in enumerate(asked):
            done = number * (1 + len(chosen))
            report_progress(on_progress, done, total, f"prompt {number + 1} dense")
            dense, logits = _answer(network, ids, new_tokens)
            answers = {}
            for index, (name, config) in enumerate(chosen.items()):
                report_progress(on_progress, done + 1 + index, total, f"prompt {number + 1} {name}")
                with prefill_mode(network, config, strict=True):
                    tokens, _ = _answer(network, ids, new_tokens)
                answers[name] = _compare(tokenizer, tokens, dense, logits)
            text = str(tokenizer.decode(dense, skip_special_tokens=True))
            found.append(PromptAnswers(corpus.name, begin, ids.shape[1], len(dense), text, answers))
    report_progress(on_progress, total, total, "done")
    sources = [corpus.source for corpus in texts]
    return AnswersResult(found, chosen, question, prompt_tokens, new_tokens, sources)


def check_answers(prompts: int, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse numbers that `compare_answers` would refuse.

    Raises
    ------
    ValueError
        If one is below 1.
    """
    numbers = {"prompts": prompts, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


def _pieces(
    tokenizer: Any, texts: Sequence[Corpus], prompts: int, prompt_tokens: int
) -> list[tuple[Corpus, int, Tensor]]:
    """Return (text, first token, tokens [prompt_tokens]) of every prompt."""
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    tokens = [encode(tokenizer, corpus.text) for corpus in texts]
    found = []
    for number in range(prompts):
        corpus, whole = texts[number % len(texts)], tokens[number % len(texts)]
        of_this = len(range(number % len(texts), prompts, len(texts)))
        if len(whole) < of_this * prompt_tokens:
            raise ValueError(
                f"the text {corpus.name!r} must have {of_this} x {prompt_tokens} tokens, got "
                f"{len(whole)}"
            )
        begin = number // len(texts) * (len(whole) - prompt_tokens) // max(1, of_this - 1)
        found.append((corpus, begin, whole[begin : begin + prompt_tokens]))
    return found


def _prompt(tokenizer: Any, piece: Tensor, question: str) -> Tensor:
    """Return the token ids of a prompt, int64 [1, T]."""
    if not question:
        return piece.unsqueeze(0)
    return encode_prompt(tokenizer, f"{tokenizer.decode(piece)}\n\n{question}", chat=True)


def _answer(model: Any, input_ids: Tensor, new_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Return the tokens of an answer, and the fp32 logits [vocabulary] that gave each."""
    input_ids = input_ids.to(next(model.parameters()).device)
    made = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, input_ids.shape[1] :].tolist()
    return tokens, [step[0].float() for step in made.logits]


def _compare(tokenizer: Any, tokens: list[int], dense: list[int], logits: list[Tensor]) -> Answer:
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    pairs = zip(tokens, dense, strict=False)
    parts_at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if parts_at is None:
        return Answer(text, None, None)
    gap = logits[parts_at][dense[parts_at]] - logits[parts_at][tokens[parts_at]]
    return Answer(text, parts_at, float(gap))
