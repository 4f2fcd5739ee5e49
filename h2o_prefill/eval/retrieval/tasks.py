"""What a retrieval prompt hides and asks: tasks in the form of RULER (NVIDIA/RULER, arXiv
2404.06654, scripts/data/synthetic), and a needle that is asked for in other words."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

# RULER's niah_multikey_1, niah_multivalue and vt; its cwe with fewer words.
_KEYS = 4
_VALUES = 4
_HOPS = 4
_COMMON, _TIMES, _RARE = 3, 5, 9

# Words of a repeated span, and how many of them the question has.
_SPAN, _GIVEN = 12, 4

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

# A statement, which begins with the answer, and a question that shares only stop words with it: a
# search for the words of the question finds nothing.
FACTS = """\
Bettina bakes fresh bread before the sun comes up. Who makes loaves in the early hours?
Tobias looks after three hundred sheep on the hill. Who earns a living with animals that give wool?
Ludmila has swum across the lake every summer. Who is good at moving through water?
Rashid paid for his house by fixing shoes. Whose work is it to mend boots?
Ingrid shows children how to read and write. Who teaches at a school?
Anselm cannot see, and finds his way with a stick. Who is blind?
Pilar grows roses and lilies behind her cottage. Who has a garden full of flowers?
Matteo was born during a snow storm in January. Whose birthday falls in winter?
Greta plays the violin at weddings. Who is a musician?
Kofi sets broken bones and cures fevers. Who is the doctor?
Yolanda sold her car and now rides a bicycle. Who travels on two wheels?
Dmitri eats neither meat nor fish. Who is a vegetarian?
Noriko counts the stars from a tower each night. Who is an astronomer?
Esteban left his wife and sons to fight in the war. Who became a soldier?
Philippa catches cod and herring from a small boat. Whose trade is fishing?
Cedric came first in every race at the fair. Who is a quick runner?
""".splitlines()


class Riddle(NamedTuple):
    """The sentences that one prompt hides in its text, and its question."""

    intro: str  # announces the question, before the text
    question: str
    lead: str  # the beginning of the answer, which the model continues, as in RULER
    answers: tuple[str, ...]
    needles: tuple[str, ...]  # sentences that hold the answers, in the order of the text
    distractors: tuple[str, ...] = ()  # sentences of the same form that hold none


class Task(NamedTuple):
    """How to make a riddle for a text in lower case, and the tokens of its answer."""

    make: Callable[[random.Random, str], Riddle]
    new_tokens: int


def _magic_numbers(rng: random.Random, text: str, keys: int = 1, values: int = 1) -> Riddle:
    """Ask for all the values of the first key, of which one or the other has several."""
    names, numbers = _names(rng, text, keys), _numbers(rng, text, 7, max(keys, values))
    hidden, asked, verb = "A special magic number is", "number", "is"
    if values > 1:
        hidden, asked, verb = "Some special magic numbers are", "numbers", "are"
    what = f"special magic {asked} for {names[0]} mentioned in the provided text"
    form = "One of the special magic numbers for {} is: {}."
    return Riddle(
        intro=f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz "
        f"you about the {asked} afterwards.",
        question=f"What {verb}{' all' if values > 1 else ''} the {what}?",
        lead=f"The {what} {verb}",
        answers=tuple(numbers[:values]),
        needles=tuple(form.format(names[0], number) for number in numbers[:values]),
        distractors=tuple(map(form.format, names[1:], numbers[1:])),
    )


def _variable_tracking(rng: random.Random, text: str) -> Riddle:
    (value,) = _numbers(rng, text, 5, 1)
    names = _distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), _HOPS + 1, text)
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return Riddle(
        intro="Memorize and track the chain(s) of variable assignment hidden in the following "
        "text.\n",
        question=f"Question: Find all variables that are assigned the value {value} in the text "
        "above.",
        lead="Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:",
        answers=tuple(names),
        needles=tuple(f"VAR {name} = {of}." for name, of in zip(names, sources, strict=True)),
    )


def _common_words(rng: random.Random, text: str) -> Riddle:
    names = _names(rng, text, _COMMON + _RARE)
    common = names[:_COMMON]
    entries = rng.sample([*names[_COMMON:], *common * _TIMES], _RARE + _COMMON * _TIMES)
    return Riddle(
        intro="A list of numbered words is hidden within the following text. Some of the words "
        "appear more often than others. Memorize the ones that appear most often.",
        question=f"What are the {_COMMON} most common words in the list?",
        lead=f"The {_COMMON} most common words in the list are",
        answers=tuple(common),
        needles=tuple(f"Word {i} is {name}." for i, name in enumerate(entries, 1)),
    )


def _repeated_span(rng: random.Random, text: str) -> Riddle:
    words = [*_ADJECTIVES.split(), *_NOUNS.split()]
    (span,) = _distinct(lambda: " ".join(rng.sample(words, _SPAN)), 1, text)
    given = " ".join(span.split()[:_GIVEN])
    return Riddle(
        intro="A row of words is hidden within the following text. Make sure to memorize it. I "
        "will ask you to go on with it afterwards.",
        question=f'How does the row of words go on that begins with "{given}"?',
        lead=given,
        answers=(span.removeprefix(f"{given} "),),
        needles=(f"The row of words: {span}.",),
    )


def _paraphrased(rng: random.Random, text: str) -> Riddle:
    facts = {fact.split()[0]: fact for fact in FACTS}
    # A name that the text has already would be a second answer.
    free = [name for name in facts if name.lower() not in text]
    if not free:
        names = ", ".join(facts)
        raise ValueError(f"text must lack one of the names of task 'paraphrased', has all: {names}")
    name = rng.choice(free)
    statement, question = facts[name].split(". ")
    return Riddle(
        intro="A fact about somebody is hidden within the following text. Make sure to memorize "
        "it. I will quiz you about it afterwards.",
        question=question,
        lead="The answer is",
        answers=(name,),
        needles=(f"{statement}.",),
    )


def _names(rng: random.Random, text: str, count: int) -> list[str]:
    adjectives, nouns = _ADJECTIVES.split(), _NOUNS.split()
    return _distinct(lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}", count, text)


def _numbers(rng: random.Random, text: str, digits: int, count: int) -> list[str]:
    low = 10 ** (digits - 1)
    return _distinct(lambda: str(rng.randrange(low, 10 * low)), count, text)


def _distinct(draw: Callable[[], str], count: int, text: str) -> list[str]:
    """Draw different strings that a text, in lower case, does not contain."""
    found: list[str] = []
    while len(found) < count:
        value = draw()
        if value not in found and value.lower() not in text:
            found.append(value)
    return found


TASKS = {
    "single": Task(_magic_numbers, new_tokens=24),
    "multi_key": Task(partial(_magic_numbers, keys=_KEYS), new_tokens=24),
    "multi_value": Task(partial(_magic_numbers, values=_VALUES), new_tokens=64),
    "variable_tracking": Task(_variable_tracking, new_tokens=48),
    "common_words": Task(_common_words, new_tokens=24),
    "repeated_span": Task(_repeated_span, new_tokens=32),
    "paraphrased": Task(_paraphrased, new_tokens=24),
}
