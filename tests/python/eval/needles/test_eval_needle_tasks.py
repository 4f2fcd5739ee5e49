"""Retrieval tasks: what is hidden and asked, and the text that it is hidden in."""

from __future__ import annotations

import random
import re

import pytest

from h2o_prefill.eval.needles.haystack import Haystack
from h2o_prefill.eval.needles.tasks import TASKS
from h2o_prefill.eval.needles.words import FACTS

SMALL_WORDS = {"a", "an", "at", "in", "of", "on", "the", "to"}
TEXT = 'It rained. He said: no! (She knew.) "Well?" A line\nwithout a stop\nand 3.14 of pi. Last'


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_answers_are_in_the_needles_and_nowhere_else(task: str, seed: int) -> None:
    riddle = TASKS[task].make(random.Random(seed), "")
    assert riddle == TASKS[task].make(random.Random(seed), "")
    assert riddle != TASKS[task].make(random.Random(seed + 100), "")
    hidden = " ".join(riddle.needles)
    for answer in riddle.answers:
        assert answer in hidden
        for other in (*riddle.distractors, riddle.intro, riddle.question, riddle.lead):
            assert answer.lower() not in other.lower()
    assert len(set(riddle.answers)) == len(riddle.answers)


@pytest.mark.parametrize(
    ("task", "needles", "distractors", "answers"),
    [
        ("single", 1, 0, 1),
        ("multi_key", 1, 3, 1),
        ("multi_value", 4, 0, 4),
        ("variable_tracking", 5, 0, 5),
        ("paraphrased", 1, 0, 1),
    ],
)
def test_counts(task: str, needles: int, distractors: int, answers: int) -> None:
    riddle = TASKS[task].make(random.Random(0), "")
    found = (len(riddle.needles), len(riddle.distractors), len(riddle.answers))
    assert found == (needles, distractors, answers)


@pytest.mark.parametrize("task", ["single", "multi_key", "multi_value"])
def test_needles_have_rulers_form(task: str) -> None:
    riddle = TASKS[task].make(random.Random(1), "")
    form = r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\."
    found = [re.fullmatch(form, needle) for needle in (*riddle.needles, *riddle.distractors)]
    keys = [match[1] for match in found if match]
    numbers = [match[2] for match in found if match]
    assert len(keys) == len(found) and len(set(numbers)) == len(numbers)
    assert len(set(keys)) == (4 if task == "multi_key" else 1)
    assert f" for {keys[0]} " in riddle.question and f" for {keys[0]} " in riddle.lead
    assert all(f" for {key} " not in riddle.question for key in set(keys[1:]) - {keys[0]})
    assert list(riddle.answers) == numbers[: len(riddle.needles)]


def test_a_chain_of_variables_leads_to_the_value() -> None:
    riddle = TASKS["variable_tracking"].make(random.Random(2), "")
    found = [re.fullmatch(r"VAR ([A-Z]{5}) = (.+)\.", needle) for needle in riddle.needles]
    names = [match[1] for match in found if match]
    assert tuple(names) == riddle.answers
    value, *sources = [match[2] for match in found if match]
    assert re.fullmatch(r"\d{5}", value) and value in riddle.question
    assert sources == [f"VAR {name}" for name in names[:-1]]


def test_what_the_text_holds_is_not_drawn() -> None:
    text = TASKS["single"].make(random.Random(0), "")
    holding = " ".join((*text.needles, *text.answers)).lower()
    other = TASKS["single"].make(random.Random(0), holding)
    assert not set(other.answers) & set(text.answers)
    assert other.needles != text.needles


def test_a_fact_whose_name_the_text_holds_is_not_asked() -> None:
    names = [fact.answer.lower() for fact in FACTS]
    free = FACTS[3]
    text = " ".join(name for name in names if name != free.answer.lower())
    for seed in range(5):
        riddle = TASKS["paraphrased"].make(random.Random(seed), text)
        assert riddle.answers == (free.answer,)
        assert riddle.needles == (free.statement,) and riddle.question == free.question
    with pytest.raises(ValueError, match=r"text must lack one of the names .* has all: Bettina,"):
        TASKS["paraphrased"].make(random.Random(0), " ".join(names))


def test_there_are_enough_facts() -> None:
    assert len(FACTS) >= 12
    assert len({fact.answer for fact in FACTS}) == len(FACTS)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.answer)
def test_a_fact_shares_no_word_with_its_question(fact: tuple[str, str, str]) -> None:
    statement, question, answer = fact
    assert statement.startswith(answer) and answer not in question
    hidden, asked = (
        {word for word in re.findall(r"[a-z]+", text.lower())} - SMALL_WORDS
        for text in (statement, question)
    )
    assert len(hidden) >= 3
    assert not hidden & asked
    # Nor do two forms of one word stand on both sides.
    assert not {word[:5] for word in hidden if len(word) > 4} & {word[:5] for word in asked}


@pytest.mark.parametrize(
    ("depth", "before"),
    [
        (0, ""),
        (10, "It rained. "),
        (25, "It rained. He said: no! "),
        (
            100,
            'It rained. He said: no! (She knew.) "Well?" A line\nwithout a stop\nand 3.14 of pi. ',
        ),
    ],
)
def test_a_needle_goes_to_the_nearest_beginning_of_a_sentence(depth: float, before: str) -> None:
    haystack = Haystack(TEXT)
    assert len(haystack) == 18
    piece = haystack.piece(0, 18, [(depth, "NEEDLE.")])
    assert piece == f"{before}NEEDLE. {TEXT[len(before) :]}"


def test_needles_go_in_order_and_white_space_is_kept() -> None:
    haystack = Haystack(TEXT)
    piece = haystack.piece(2, 8, [(100, "C."), (0, "A."), (100, "D."), (40, "B.")])
    assert piece == 'A. He said: no! B. (She knew.) "Well?" A line\nC. D.'
    assert Haystack("One. Two.").piece(0, 2, [(100, "C.")]) == "One. Two. C."
    assert Haystack("One. Two.").piece(0, 0, [(50, "C.")]) == "C."


def test_pieces_begin_with_a_sentence_and_have_room() -> None:
    haystack = Haystack(TEXT)
    begins = {haystack.draw_begin(random.Random(seed), 11) for seed in range(60)}
    assert begins == {0, 2, 5, 7}
    assert {haystack.draw_begin(random.Random(seed), 99) for seed in range(9)} == {0}
