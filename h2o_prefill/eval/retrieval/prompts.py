"""Prompts of retrieval tasks: needles in a text, built to a length in tokens."""

from __future__ import annotations

import bisect
import hashlib
import random
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_prefill.eval.retrieval.tasks import TASKS, Riddle
from h2o_prefill.generation.prompts import encode_prompt

QUESTIONS = ("last", "first")

# A word and the white space after it.
_WORD = re.compile(r"\S+\s*")
# A full stop with what may close around it, or a new line. Abbreviations count too: a needle may
# then stand within a sentence, which does no harm.
_ENDS_SENTENCE = re.compile(r"""[.!?]["'”’)\]]*\s*\Z|\n""")


class Haystack:
    """A text as words, with the numbers of the words at which sentences begin."""

    def __init__(self, text: str) -> None:
        self.lower = text.lower()
        self._words = _WORD.findall(text)
        ends = (i for i, word in enumerate(self._words, 1) if _ENDS_SENTENCE.search(word))
        self._begins = [0, *ends]

    def __len__(self) -> int:
        """Count the words."""
        return len(self._words)

    def draw_begin(self, rng: random.Random, words: int) -> int:
        """Draw a word at which a sentence begins, and after which `words` follow if possible."""
        last = bisect.bisect_right(self._begins, len(self) - words)
        return self._begins[rng.randrange(max(1, last))]

    def piece(self, begin: int, words: int, needles: Iterable[tuple[float, str]]) -> str:
        """Return words and needles, (depth in percent, text), where the nearest sentence begins."""
        first = bisect.bisect_left(self._begins, begin)
        past = bisect.bisect_right(self._begins, begin + words)
        begins = self._begins[first:past]
        located = [
            (min(begins, key=lambda word: abs(word - (begin + depth / 100 * words))), needle)
            for depth, needle in needles
        ]
        parts: list[str] = []
        done = begin
        for word, needle in sorted(located, key=lambda item: item[0]):
            before = "".join(self._words[done:word])
            # The last word of a text has no white space after it.
            gap = " " if before and not before[-1].isspace() else ""
            parts += [before, gap, needle, " "]
            done = word
        return "".join([*parts, *self._words[done : begin + words]]).rstrip()


class RetrievalPrompt(NamedTuple):
    """A prompt and what its answer must contain."""

    input_ids: Tensor  # int64 [1, T]: all tokens but those of the answer, or a word less
    new_tokens: int  # tokens of the answer, at most
    answers: tuple[str, ...]
    expected: Tensor  # int64 [1, A]: the tokens of the answers, with commas between


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
    """Hide a task's needles in as much text as fits a length of prompt and answer together.

    One of the needles goes to `depth`, the others and the distractors to random depths; needles
    keep their order. If the tokenizer has a chat template, the prompt is a user's message followed
    by the beginning of the answer. With the question last, that beginning repeats the question's
    key, as in RULER; with the question first, it says nothing about it.

    Raises ValueError if the length has no room for the task, or the text is too short for it.
    """
    kind = TASKS[task]
    rng = random.Random(seed)
    riddle = kind.make(rng, haystack.lower)
    depths = sorted([depth, *(rng.uniform(0, 100) for _ in riddle.needles[1:])])
    needles = list(zip(depths, riddle.needles, strict=True))
    needles += [(rng.uniform(0, 100), text) for text in riddle.distractors]
    budget = length - kind.new_tokens
    begin = haystack.draw_begin(rng, budget)
    available = len(haystack) - begin

    def encoded(words: int) -> Tensor:
        return _encode(tokenizer, riddle, haystack.piece(begin, words, needles), question)

    # A word has at least one token.
    sizes = range(min(available, budget) + 1)
    words = bisect.bisect_right(sizes, budget, key=lambda words: encoded(words).shape[1]) - 1
    if words < 0:
        raise ValueError(
            f"lengths must be >= {encoded(0).shape[1] + kind.new_tokens} for task {task!r}, the "
            f"tokens of its prompt without any text and of its answer, got {length}"
        )
    if words == available:
        raise ValueError(
            f"text must be longer for lengths of {length} tokens: {available} words are too few"
        )
    expected = _continuation(tokenizer, f" {', '.join(riddle.answers)}")
    return RetrievalPrompt(encoded(words), kind.new_tokens, riddle.answers, expected)


def _encode(tokenizer: Any, riddle: Riddle, text: str, question: str) -> Tensor:
    if question == "last":
        message, gap, lead = f"{riddle.intro}\n{text}\n{riddle.question}", " ", riddle.lead
    else:
        message = f"Answer this question about the following text. {riddle.question}\n{text}"
        gap, lead = "\n", "The answer is"
    if not getattr(tokenizer, "chat_template", None):
        return encode_prompt(tokenizer, f"{message}{gap}{lead}", chat=False)
    asked = encode_prompt(tokenizer, message, chat=True)
    return torch.cat([asked, _continuation(tokenizer, lead)], dim=1)


def _continuation(tokenizer: Any, text: str) -> Tensor:
    """Return the tokens of a text that goes on, int64 [1, T]."""
    encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
    ids: Tensor = encoded["input_ids"]
    return ids
