"""The words of retrieval tasks: keys of needles, and facts whose question shares no word."""

from __future__ import annotations

from typing import NamedTuple


class Fact(NamedTuple):
    """A statement, a question about it in other words, and the answer, a name."""

    statement: str
    question: str
    answer: str


# A key is an adjective and a noun with a hyphen between, as RULER's are.
_ADJECTIVES = (
    "ancient bitter bright calm careful cheerful clever clumsy crooked curious distant eager "
    "elegant fierce fragile gentle golden hollow honest humble jolly lonely massive narrow noisy "
    "patient polite proud quiet rapid rusty shiny silent slender sturdy tender thirsty tidy vivid "
    "weary"
)
_NOUNS = (
    "anchor apple badge barrel basket beetle blanket bridge bucket button candle carpet cherry "
    "compass copper cradle feather ferry garlic hammer harbor helmet kettle ladder lantern magnet "
    "mirror mushroom needle otter pebble pepper pigeon ribbon saddle spoon tunnel turtle walnut "
    "whistle"
)
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

# No word of a question stands in its statement, but for the smallest: what finds the statement by
# its words finds nothing.
FACTS = (
    Fact(
        "Bettina bakes fresh bread before the sun comes up.",
        "Who makes loaves in the early hours?",
        "Bettina",
    ),
    Fact(
        "Tobias looks after three hundred sheep on the hill.",
        "Who earns a living with animals that give wool?",
        "Tobias",
    ),
    Fact(
        "Ludmila has swum across the lake every summer.",
        "Who is good at moving through water?",
        "Ludmila",
    ),
    Fact(
        "Rashid paid for his house by fixing shoes.",
        "Whose work is it to mend boots?",
        "Rashid",
    ),
    Fact(
        "Ingrid shows children how to read and write.",
        "Who teaches at a school?",
        "Ingrid",
    ),
    Fact(
        "Anselm cannot see, and finds his way with a stick.",
        "Who is blind?",
        "Anselm",
    ),
    Fact(
        "Pilar grows roses and lilies behind her cottage.",
        "Who has a garden full of flowers?",
        "Pilar",
    ),
    Fact(
        "Matteo was born during a snow storm in January.",
        "Whose birthday falls in winter?",
        "Matteo",
    ),
    Fact(
        "Greta plays the violin at weddings.",
        "Who is a musician?",
        "Greta",
    ),
    Fact(
        "Kofi sets broken bones and cures fevers.",
        "Who is the doctor?",
        "Kofi",
    ),
    Fact(
        "Yolanda sold her car and now rides a bicycle.",
        "Who travels on two wheels?",
        "Yolanda",
    ),
    Fact(
        "Dmitri eats neither meat nor fish.",
        "Who is a vegetarian?",
        "Dmitri",
    ),
    Fact(
        "Noriko counts the stars from a tower each night.",
        "Who is an astronomer?",
        "Noriko",
    ),
    Fact(
        "Esteban left his wife and sons to fight in the war.",
        "Who became a soldier?",
        "Esteban",
    ),
    Fact(
        "Philippa catches cod and herring from a small boat.",
        "Whose trade is fishing?",
        "Philippa",
    ),
    Fact(
        "Cedric came first in every race at the fair.",
        "Who is a quick runner?",
        "Cedric",
    ),
)
