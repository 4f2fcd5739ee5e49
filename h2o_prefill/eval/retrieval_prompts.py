"""Prompts of retrieval tasks: needles in a text, built to a length in tokens.

The tasks have the form of RULER's (NVIDIA/RULER, arXiv 2404.06654, scripts/data/synthetic):
niah_single, niah_multikey_1 and niah_multivalue.
"""

from __future__ import annotations

import bisect
import hashlib
import random
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_prefill.generation.prompts import encode_continuation, encode_prompt

# A key is an adjective and a noun joined by a hyphen, as RULER's are.
_ADJECTIVES = """
ancient bitter bright calm careful cheerful clever clumsy crooked curious distant eager elegant
fierce fragile gentle golden hollow honest humble jolly lonely massive narrow noisy patient polite
proud quiet rapid rusty shiny silent slender sturdy tender thirsty tidy vivid weary
"""
_NOUNS = """
anchor apple badge barrel basket beetle blanket bridge bucket button candle carpet cherry compass
copper cradle feather ferry garlic hammer harbor helmet kettle ladder lantern magnet mirror mushroom
needle otter pebble pepper pigeon ribbon saddle spoon tunnel turtle walnut whistle
"""

# A word and the white space after it.
_WORD = re.compile(r"\S+\s*")
# A full stop with what may close around it, or a new line. Abbreviations count too: a needle may
# then stand within a sentence, which does no harm.
_ENDS_SENTENCE = re.compile(r"""[.!?]["'”’)\]]*\s*\Z|\n""")


class Riddle(NamedTuple):
    """The sentences that one prompt hides in its text, and its question."""

    intro: str  # announces the question, before the text
    question: str
    lead: str  # the beginning of the answer, which the model continues, as in RULER
    answers: tuple[str, ...]
    needles: tuple[str, ...]  # sentences that hold the answers, in the order of the text
    distractors: tuple[str, ...]  # sentences of the same form that hold none


class Task(NamedTuple):
    """Magic numbers of some keys, and a question for the numbers of the first."""

    keys: int
    values: int  # of the first key; the others have one
    new_tokens: int  # of an answer, at most

    def make(self, rng: random.Random, text: str) -> Riddle:
        """Draw keys and numbers that a text, in lower case, does not contain."""
        adjectives, nouns = _ADJECTIVES.split(), _NOUNS.split()
        names = _distinct(lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}", self.keys, text)
        numbers = _distinct(
            lambda: str(rng.randrange(10**6, 10**7)), max(self.keys, self.values), text
        )
        hidden, asked, verb = "A special magic number is", "number", "is"
        if self.values > 1:
            hidden, asked, verb = "Some special magic numbers are", "numbers", "are"
        what = f"special magic {asked} for {names[0]} mentioned in the provided text"
        form = "One of the special magic numbers for {} is: {}."
        return Riddle(
            intro=f"{hidden} hidden within the following text. Make sure to memorize it. I will "
            f"quiz you about the {asked} afterwards.",
            question=f"What {verb}{' all' if self.values > 1 else ''} the {what}?",
            lead=f"The {what} {verb}",
            answers=tuple(numbers[: self.values]),
            needles=tuple(form.format(names[0], number) for number in numbers[: self.values]),
            distractors=tuple(map(form.format, names[1:], numbers[1:])),
        )


TASKS = {
    "single": Task(keys=1, values=1, new_tokens=24),
    "multi_key": Task(keys=4, values=1, new_tokens=24),
    "multi_value": Task(keys=1, values=4, new_tokens=64),
}


def _distinct(draw: Callable[[], str], count: int, text: str) -> list[str]:
    values: list[str] = []
    while len(values) < count:
        value = draw()
        if value not in values and value not in text:
            values.append(value)
    return values


class Haystack:
    """A text as words, with the numbers of the words at which sentences begin."""

    def __init__(self, text: str) -> None:
        self.lower = text.lower()
        # Each word has white space after it.
        self._words = _WORD.findall(text if text[-1:].isspace() else f"{text} ")
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
        past = bisect.bisect_right(self._begins, begin + words)
        begins = self._begins[bisect.bisect_left(self._begins, begin) : past]
        located = [
            (min(begins, key=lambda word: abs(word - (begin + depth / 100 * words))), needle)
            for depth, needle in needles
        ]
        parts: list[str] = []
        done = begin
        for word, needle in sorted(located, key=lambda item: item[0]):
            parts += [*self._words[done:word], needle, " "]
            done = word
        return "".join([*parts, *self._words[done : begin + words]]).rstrip()


class RetrievalPrompt(NamedTuple):
    """A prompt and what its answer must contain."""

    input_ids: Tensor  # int64 [1, T]: all tokens before the answer, or a word less
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
    seed: int = 0,
) -> RetrievalPrompt:
    """Hide a task's needles in as much text as fits a length of prompt and answer together.

    One of the needles goes to `depth`, the others and the distractors to random depths; needles
    keep their order. If the tokenizer has a chat template, the prompt is a user's message followed
    by the beginning of the answer, which repeats the question's key, as in RULER.

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
        return _encode(tokenizer, riddle, haystack.piece(begin, words, needles))

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
    expected = encode_continuation(tokenizer, f" {', '.join(riddle.answers)}")
    return RetrievalPrompt(encoded(words), kind.new_tokens, riddle.answers, expected)


def _encode(tokenizer: Any, riddle: Riddle, text: str) -> Tensor:
    message = f"{riddle.intro}\n{text}\n{riddle.question}"
    if not getattr(tokenizer, "chat_template", None):
        return encode_prompt(tokenizer, f"{message} {riddle.lead}", chat=False)
    asked = encode_prompt(tokenizer, message, chat=True)
    return torch.cat([asked, encode_continuation(tokenizer, riddle.lead)], dim=1)
