"""Prompts of retrieval tasks, built to a length in tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.eval.inputs.prompts import encode_prompt
from h2o_prefill.eval.needles.haystack import Haystack
from h2o_prefill.eval.needles.tasks import TASKS, Riddle

QUESTIONS = ("last", "first")


@dataclass(frozen=True)
class PromptKey:
    """What tells a prompt from the others of a run.

    Attributes
    ----------
    task : str
    length : int
        Tokens of prompt and answer together, at most.
    depth : float
        Percent of the text before the needle.
    seed : int
        Gives the same prompt again (`build_prompt`).
    """

    task: str
    length: int
    depth: float
    seed: int


@dataclass(frozen=True)
class RetrievalPrompt(PromptKey):
    """A prompt (`PromptKey`) and what its answer must hold.

    Attributes
    ----------
    input_ids : Tensor
        int64 [1, T], with T = length - new_tokens or a word less.
    new_tokens : int
        Room for the answer, tokens.
    answers : tuple of str
    """

    input_ids: Tensor
    new_tokens: int
    answers: tuple[str, ...]


def prompt_seed(seed: int, task: str, length: int, depth: float, index: int) -> int:
    """Return the seed of one prompt of a run, the same in every process."""
    digest = hashlib.sha256(f"{seed}/{task}/{length}/{depth:g}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def build_prompt(
    task: str,
    tokenizer: Any,
    haystack: Haystack,
    length: int,
    depth: float,
    *,
    question: str = "last",
    seed: int = 0,
) -> RetrievalPrompt:
    """Hide a task's needles in a piece of text as long as the tokens allow.

    One needle of those asked for goes to `depth`, the others and the distractors to random depths;
    those asked for keep their order. If the tokenizer has a chat template, the prompt is a user's
    message, and the beginning of the answer is that of the assistant's. With the question last, the
    answer begins as RULER's does, which repeats the question's key; with the question first, it
    begins with words that say nothing about it.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    tokenizer
        The model's.
    haystack : Haystack
    length : int
        Tokens of prompt and answer together, as RULER counts them. The prompt takes what the
        answer leaves, to the last word of text that fits: it is never longer.
    depth : float
        Percent of the text before the needle, to within a sentence.
    question : {"last", "first"}
        Whether the question stands after or before the text.
    seed : int

    Raises
    ------
    ValueError
        If the length has no room for the task, or the text is too short for the length.
    """
    kind = TASKS[task]
    rng = random.Random(seed)
    riddle = kind.make(rng, haystack.lower)
    needles = _located(rng, riddle, depth)
    budget = length - kind.new_tokens
    begin = haystack.draw_begin(rng, budget)

    def encoded(words: int) -> Tensor:
        return _encode(tokenizer, riddle, haystack.piece(begin, words, needles), question)

    words = _most_words(encoded, budget, len(haystack) - begin, task, kind.new_tokens)
    return RetrievalPrompt(
        task, length, depth, seed, encoded(words), kind.new_tokens, riddle.answers
    )


def _located(rng: random.Random, riddle: Riddle, depth: float) -> list[tuple[float, str]]:
    count = len(riddle.needles)
    depths = sorted([depth, *(rng.uniform(0, 100) for _ in range(count - 1))])
    others = [(rng.uniform(0, 100), text) for text in riddle.distractors]
    return [*zip(depths, riddle.needles, strict=True), *others]


def _most_words(
    encoded: Callable[[int], Tensor], budget: int, available: int, task: str, new_tokens: int
) -> int:
    """Return a number of words that fits the budget while one more does not."""
    least = encoded(0).shape[1]
    if least > budget:
        raise ValueError(
            f"lengths must be >= {least + new_tokens} for task {task!r}, whose prompt without any "
            f"text and answer take that, got {budget + new_tokens}"
        )
    # Tokens need not grow with every word: what holds is that `low` fits and `high` does not.
    low, high = 0, min(max(1, budget // 2), available)
    while encoded(high).shape[1] <= budget:
        if high == available:
            raise ValueError(
                f"text must be longer for lengths of {budget + new_tokens} tokens: "
                f"{available} words are too few"
            )
        low, high = high, min(2 * high, available)
    while high - low > 1:
        middle = (low + high) // 2
        if encoded(middle).shape[1] <= budget:
            low = middle
        else:
            high = middle
    return low


def _encode(tokenizer: Any, riddle: Riddle, text: str, question: str) -> Tensor:
    if question == "last":
        message, gap, lead = f"{riddle.intro}\n{text}\n{riddle.question}", " ", riddle.lead
    else:
        message = f"Answer this question about the following text. {riddle.question}\n{text}"
        gap, lead = "\n", "The answer is"
    if not getattr(tokenizer, "chat_template", None):
        return encode_prompt(tokenizer, f"{message}{gap}{lead}", chat=False)
    asked = encode_prompt(tokenizer, message, chat=True)
    begun = tokenizer(lead, add_special_tokens=False, return_tensors="pt", verbose=False)
    return torch.cat([asked, begun["input_ids"]], dim=1)
