"""Retrieval prompts: their length, where the needles stand, and what frames them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from h2o_prefill.eval.needles.haystack import Haystack
from h2o_prefill.eval.needles.prompts import RetrievalPrompt, build_prompt, prompt_seed
from h2o_prefill.eval.needles.tasks import TASKS

pytest.importorskip("transformers")

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Sentences of 2 to 12 words of 1 to 9 letters, none longer than 120 characters.
_RNG = random.Random(0)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["".join(_RNG.choices(_LETTERS, k=_RNG.randint(1, 9))) for _ in range(300)]
TEXT = " ".join(
    " ".join(_RNG.choices(WORDS, k=_RNG.randint(2, 12))).capitalize() + "." for _ in range(900)
)
HAYSTACK = Haystack(TEXT)
LONGEST_SENTENCE = 120
LENGTH = 3000


def _text(tokenizer: Any, prompt: RetrievalPrompt) -> str:
    return str(tokenizer.decode(prompt.input_ids[0]))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("question", ["last", "first"])
@pytest.mark.parametrize("task", TASKS)
def test_the_length_is_used_and_never_exceeded(
    tiny: Any, task: str, question: str, chat: bool
) -> None:
    tokenizer = tiny.make_tokenizer(add_bos=not chat)
    tokenizer.chat_template = TEMPLATE if chat else None
    for length in (1200, 1213):
        prompt = build_prompt(task, tokenizer, HAYSTACK, length, 50, question=question, seed=3)
        count = prompt.input_ids.shape[1]
        room = length - TASKS[task].new_tokens
        # One token a byte: the next word, of at most 9 letters, a stop and a space, does not fit.
        assert room - 11 <= count <= room
        assert (prompt.new_tokens, prompt.length) == (TASKS[task].new_tokens, length)


@pytest.mark.parametrize("depth", [0, 20, 50, 77.5, 100])
@pytest.mark.parametrize("task", ["single", "multi_key", "paraphrased"])
def test_the_needle_stands_at_its_depth_within_a_sentence(
    tiny_tokenizer: Any, task: str, depth: float
) -> None:
    for seed in range(2):
        prompt = build_prompt(task, tiny_tokenizer, HAYSTACK, LENGTH, depth, seed=seed)
        text = _text(tiny_tokenizer, prompt)
        intro, question = text.split("afterwards.\n")[0], text.rindex("\nWh")
        context = text[len(intro) + len("afterwards.\n") : question]
        (answer,) = prompt.answers
        needle = next(
            sentence
            for sentence in re.findall(r"(?:One of|[A-Z][a-z]+ )[^.]*\.", context)
            if answer in sentence
        )
        assert context.count(needle) == 1 and context.lower().count(answer.lower()) == 1
        before = context.index(needle)
        # The distractors, of 70 characters at most, are no part of the text that depth counts.
        slack = LONGEST_SENTENCE + (3 * 70 if task == "multi_key" else 0)
        whole = len(context) - len(needle)
        assert before == pytest.approx(depth / 100 * whole, abs=slack)
        assert before == 0 or context[:before].endswith(". ")


def test_depth_moves_one_needle_of_many_and_a_chain_keeps_its_order(tiny_tokenizer: Any) -> None:
    for task in ("multi_value", "variable_tracking"):
        for depth in (0, 100):
            for seed in range(2):
                prompt = build_prompt(task, tiny_tokenizer, HAYSTACK, LENGTH, depth, seed=seed)
                text = _text(tiny_tokenizer, prompt)
                places = [text.index(answer) for answer in prompt.answers]
                assert places == sorted(places)
                assert places[-1] - places[0] > LENGTH / 5, "the others are spread"
                begin, end = text.index("\n"), text.index("\nQuestion" if "VAR" in text else "\nWh")
                distance = places[0] - begin if depth == 0 else end - places[-1]
                assert 0 < distance < LONGEST_SENTENCE + 70


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_prompt_and_both_orders_hide_the_same(
    tiny_tokenizer: Any, task: str
) -> None:
    def build(seed: int, question: str = "last") -> RetrievalPrompt:
        return build_prompt(task, tiny_tokenizer, HAYSTACK, 1500, 30, question=question, seed=seed)

    first = build(5)
    assert first.input_ids.tolist() == build(5).input_ids.tolist()
    assert first.answers == build(5, "first").answers
    assert first.input_ids.tolist() != build(6).input_ids.tolist()


def test_texts_of_different_seeds_begin_at_different_places(tiny_tokenizer: Any) -> None:
    texts = [
        _text(
            tiny_tokenizer,
            build_prompt("single", tiny_tokenizer, HAYSTACK, 1500, 100, seed=seed),
        ).split("afterwards.\n")[1]
        for seed in range(4)
    ]
    begins = {text[:60] for text in texts}
    assert len(begins) == 4
    assert all(TEXT.startswith(begin) or f". {begin}" in TEXT for begin in begins)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_what_frames_the_text(tiny: Any, task: str, chat: bool) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = TEMPLATE if chat else None
    riddle = TASKS[task].make(random.Random(9), HAYSTACK.lower)
    begin, end = ("<user>", "</end><assistant>") if chat else ("", "")
    last = _text(tokenizer, build_prompt(task, tokenizer, HAYSTACK, 1500, 50, seed=9))
    assert last.startswith(f"{begin}{riddle.intro}\n")
    assert last.endswith(f"\n{riddle.question}{end or ' '}{riddle.lead}")
    first = _text(
        tokenizer, build_prompt(task, tokenizer, HAYSTACK, 1500, 50, question="first", seed=9)
    )
    opening = f"{begin}Answer this question about the following text. {riddle.question}\n"
    assert first.startswith(opening)
    assert first.endswith((end or "\n") + "The answer is")
    assert first.count(riddle.question) == 1
    for needle in (*riddle.needles, *riddle.distractors):
        assert last.count(needle) == first.count(needle) == 1


def test_seeds_differ_by_cell_and_stay() -> None:
    seeds = {
        prompt_seed(seed, task, length, depth, index)
        for seed in (0, 1)
        for task in TASKS
        for length in (2048, 4096)
        for depth in (0, 50)
        for index in range(3)
    }
    assert len(seeds) == 2 * len(TASKS) * 2 * 2 * 3
    assert prompt_seed(0, "single", 2048, 50, 0) == prompt_seed(0, "single", 2048, 50.0, 0)


def test_no_room_for_the_task(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"lengths must be >= (\d+) for task 'single'") as error:
        build_prompt("single", tiny_tokenizer, HAYSTACK, 100, 50)
    least = int(re.findall(r"\d+", str(error.value))[0])
    assert build_prompt("single", tiny_tokenizer, HAYSTACK, least, 50).input_ids.shape[1] > 200
    with pytest.raises(ValueError, match=f"got {least - 1}"):
        build_prompt("single", tiny_tokenizer, HAYSTACK, least - 1, 50)


def test_a_text_that_is_too_short(tiny_tokenizer: Any) -> None:
    short = Haystack(TEXT[:500])
    assert build_prompt("single", tiny_tokenizer, short, 800, 50).input_ids.shape[1] > 700
    with pytest.raises(ValueError, match="text must be longer for lengths of 1600 tokens"):
        build_prompt("single", tiny_tokenizer, short, 1600, 50)
