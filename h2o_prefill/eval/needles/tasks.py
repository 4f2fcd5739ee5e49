"""What a retrieval prompt hides and asks: tasks in the form of RULER (NVIDIA/RULER, arXiv
2404.06654, scripts/data/synthetic), and a needle that is asked for in other words."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from h2o_prefill.eval.needles.words import ADJECTIVES, FACTS, NOUNS

# RULER's niah_multikey_1, niah_multivalue and vt.
_KEYS = 4
_VALUES = 4
_HOPS = 4


@dataclass(frozen=True)
class Riddle:
    """What one prompt hides in its text and asks for.

    Attributes
    ----------
    needles : tuple of str
        Sentences that hold the answer, in the order in which they stand in the text.
    distractors : tuple of str
        Sentences of the same form that do not.
    intro : str
        Announces the question, before the text.
    question : str
    lead : str
        How the answer begins: the model goes on from here, as in RULER.
    answers : tuple of str
        What the answer must hold.
    """

    needles: tuple[str, ...]
    distractors: tuple[str, ...]
    intro: str
    question: str
    lead: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A kind of riddle.

    Attributes
    ----------
    make : callable
        Takes a random generator and the text in lower case; returns a riddle whose answers the
        text does not hold.
    new_tokens : int
        Room for the answer, tokens.
    """

    make: Callable[[random.Random, str], Riddle]
    new_tokens: int


def _single(rng: random.Random, text: str) -> Riddle:
    return _one_number(rng, text, keys=1)


def _multi_key(rng: random.Random, text: str) -> Riddle:
    return _one_number(rng, text, keys=_KEYS)


def _one_number(rng: random.Random, text: str, keys: int) -> Riddle:
    names, numbers = _names(rng, text, keys), _numbers(rng, text, 7, keys)
    asked, *others = map(_needle, names, numbers)
    what = f"special magic number for {names[0]} mentioned in the provided text"
    return Riddle(
        needles=(asked,),
        distractors=tuple(others),
        intro="A special magic number is hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the number afterwards.",
        question=f"What is the {what}?",
        lead=f"The {what} is",
        answers=(numbers[0],),
    )


def _multi_value(rng: random.Random, text: str) -> Riddle:
    (name,), numbers = _names(rng, text, 1), _numbers(rng, text, 7, _VALUES)
    what = f"special magic numbers for {name} mentioned in the provided text"
    return Riddle(
        needles=tuple(_needle(name, number) for number in numbers),
        distractors=(),
        intro="Some special magic numbers are hidden within the following text. Make sure to "
        "memorize it. I will quiz you about the numbers afterwards.",
        question=f"What are all the {what}?",
        lead=f"The {what} are",
        answers=tuple(numbers),
    )


def _variable_tracking(rng: random.Random, text: str) -> Riddle:
    (value,) = _numbers(rng, text, 5, 1)
    names = _distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), _HOPS + 1, text)
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return Riddle(
        needles=tuple(
            f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)
        ),
        distractors=(),
        intro="Memorize and track the chain(s) of variable assignment hidden in the following "
        "text.\n",
        question=f"Question: Find all variables that are assigned the value {value} in the text "
        "above.",
        lead="Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:",
        answers=tuple(names),
    )


def _paraphrased(rng: random.Random, text: str) -> Riddle:
    # A name that the text knows already would be a second answer.
    free = [fact for fact in FACTS if fact.answer.lower() not in text]
    if not free:
        names = ", ".join(fact.answer for fact in FACTS)
        raise ValueError(f"text must lack one of the names of task 'paraphrased', has all: {names}")
    fact = rng.choice(free)
    return Riddle(
        needles=(fact.statement,),
        distractors=(),
        intro="A fact about somebody is hidden within the following text. Make sure to memorize "
        "it. I will quiz you about it afterwards.",
        question=fact.question,
        lead="The answer is",
        answers=(fact.answer,),
    )


def _needle(name: str, number: str) -> str:
    return f"One of the special magic numbers for {name} is: {number}."


def _names(rng: random.Random, text: str, count: int) -> list[str]:
    return _distinct(lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", count, text)


def _numbers(rng: random.Random, text: str, digits: int, count: int) -> list[str]:
    low = 10 ** (digits - 1)
    return _distinct(lambda: str(rng.randrange(low, 10 * low)), count, text)


def _distinct(draw: Callable[[], str], count: int, text: str) -> list[str]:
    """Draw different strings that a text, in lower case, does not hold."""
    found: list[str] = []
    while len(found) < count:
        value = draw()
        if value not in found and value.lower() not in text:
            found.append(value)
    return found


TASKS = {
    "single": Task(_single, new_tokens=24),
    "multi_key": Task(_multi_key, new_tokens=24),
    "multi_value": Task(_multi_value, new_tokens=64),
    "variable_tracking": Task(_variable_tracking, new_tokens=48),
    "paraphrased": Task(_paraphrased, new_tokens=24),
}
