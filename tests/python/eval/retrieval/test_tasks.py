"""Retrieval tasks: what is hidden and asked."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from h2o_prefill.eval.retrieval.tasks import FACTS, TASKS

SMALL_WORDS = {"a", "an", "at", "in", "of", "on", "the", "to"}


# Needles, and answers where there are fewer.
NEEDLES = {
    "single": 1,
    "multi_key": 1,
    "multi_value": 4,
    "variable_tracking": 5,
    "common_words": 24,
    "repeated_span": 1,
    "paraphrased": 1,
}
ANSWERS = {**NEEDLES, "common_words": 3}


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_needles_and_nowhere_else(task: str) -> None:
    needles, distractors = NEEDLES[task], 3 if task == "multi_key" else 0
    for seed in range(3):
        riddle = TASKS[task].make(random.Random(seed), "")
        assert riddle == TASKS[task].make(random.Random(seed), "")
        assert riddle != TASKS[task].make(random.Random(seed + 100), "")
        assert (len(riddle.needles), len(riddle.distractors)) == (needles, distractors)
        assert len(set(riddle.answers)) == ANSWERS[task]
        for answer in riddle.answers:
            assert answer in " ".join(riddle.needles)
            for other in (*riddle.distractors, riddle.intro, riddle.question, riddle.lead):
                assert answer.lower() not in other.lower()
        # Text that holds an answer already would give it away.
        other = TASKS[task].make(random.Random(seed), " ".join(riddle.needles).lower())
        assert not set(other.answers) & set(riddle.answers)


def test_a_chain_of_variables_leads_to_the_value() -> None:
    riddle = TASKS["variable_tracking"].make(random.Random(2), "")
    found = [re.findall(r"VAR ([A-Z]{5}) = (.+)\.", needle)[0] for needle in riddle.needles]
    names, (value, *sources) = zip(*found, strict=True)
    assert names == riddle.answers
    assert re.fullmatch(r"\d{5}", value) and value in riddle.question
    assert sources == [f"VAR {name}" for name in names[:-1]]


def test_common_words_are_those_that_appear_most_often() -> None:
    riddle = TASKS["common_words"].make(random.Random(2), "")
    found = [re.findall(r"Word (\d+) is (\S+)\.", needle)[0] for needle in riddle.needles]
    numbers, names = zip(*found, strict=True)
    assert [int(number) for number in numbers] == list(range(1, 25))
    (*common, rare) = Counter(names).most_common(4)
    assert {name for name, _ in common} == set(riddle.answers)
    assert [count for _, count in common] == [5, 5, 5] and rare[1] == 1


def test_a_span_begins_with_what_the_question_has_of_it() -> None:
    riddle = TASKS["repeated_span"].make(random.Random(2), "")
    assert riddle.needles == (f"The row of words: {riddle.lead} {riddle.answers[0]}.",)
    assert len(riddle.lead.split()) == 4 and len(riddle.answers[0].split()) == 8
    assert f'"{riddle.lead}"' in riddle.question


def test_a_text_with_every_name_has_no_room_for_a_fact() -> None:
    names = " ".join(fact.split()[0] for fact in FACTS).lower()
    with pytest.raises(ValueError, match=r"text must lack one of the names .* has all: Bettina,"):
        TASKS["paraphrased"].make(random.Random(0), names)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.split()[0])
def test_a_fact_shares_no_word_with_its_question(fact: str) -> None:
    statement, question = fact.split(". ")
    assert statement.split()[0] not in question and question.endswith("?")
    hidden, asked = (
        set(re.findall(r"[a-z]+", text.lower())) - SMALL_WORDS for text in (statement, question)
    )
    assert len(hidden) >= 3 and not hidden & asked
    # Nor do two forms of one word stand on both sides.
    assert not {word[:5] for word in hidden if len(word) > 4} & {word[:5] for word in asked}
