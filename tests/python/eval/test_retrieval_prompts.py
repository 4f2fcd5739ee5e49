"""Retrieval prompts: what is hidden and asked, their length, and where the needles stand."""

import random

import pytest

from h2o_prefill.eval.retrieval_prompts import TASKS, Haystack, build_prompt

pytest.importorskip("transformers")

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SENTENCES = (
    'It rained. He said: no! (She knew.) "Well?" A line\nwithout a stop\nand 3.14 of pi. Last'
)
# Sentences of 2 to 12 words of 1 to 9 letters.
_RNG = random.Random(0)
WORDS = [
    "".join(_RNG.choices("abcdefghijklmnopqrstuvwxyz", k=_RNG.randint(1, 9))) for _ in range(300)
]
TEXT = " ".join(
    " ".join(_RNG.choices(WORDS, k=_RNG.randint(2, 12))).capitalize() + "." for _ in range(900)
)
HAYSTACK = Haystack(TEXT)


@pytest.mark.parametrize(
    "task, needles, distractors", [("single", 1, 0), ("multi_key", 1, 3), ("multi_value", 4, 0)]
)
def test_answers_are_in_the_needles_and_nowhere_else(task, needles, distractors):
    riddle = TASKS[task].make(random.Random(0), "")
    assert riddle != TASKS[task].make(random.Random(100), "")
    assert (len(riddle.needles), len(riddle.distractors)) == (needles, distractors)
    assert len(set(riddle.answers)) == needles
    others = (*riddle.distractors, riddle.intro, riddle.question, riddle.lead)
    for answer in riddle.answers:
        assert answer in " ".join(riddle.needles) and answer not in " ".join(others)
    # Text that holds an answer already would give it away.
    again = TASKS[task].make(random.Random(0), " ".join(riddle.needles).lower())
    assert not set(again.answers) & set(riddle.answers)


def test_a_needle_goes_to_the_nearest_beginning_of_a_sentence():
    haystack = Haystack(SENTENCES)
    assert len(haystack) == 18
    begins = {0: "", 10: "It rained. ", 25: "It rained. He said: no! "}
    for depth, before in {**begins, 100: SENTENCES.removesuffix("Last")}.items():
        piece = haystack.piece(0, 18, [(depth, "NEEDLE.")])
        assert piece == f"{before}NEEDLE. {SENTENCES[len(before) :]}"
    piece = haystack.piece(2, 8, [(100, "C."), (0, "A."), (100, "D."), (40, "B.")])
    assert piece == 'A. He said: no! B. (She knew.) "Well?" A line\nC. D.'
    # Pieces begin with a sentence and have room.
    begins = {haystack.draw_begin(random.Random(seed), 11) for seed in range(60)}
    assert begins == {0, 2, 5, 7}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_length_and_frame(tiny, task, chat):
    tokenizer = tiny.make_tokenizer(add_bos=not chat)
    tokenizer.chat_template = TEMPLATE if chat else None
    riddle = TASKS[task].make(random.Random(9), HAYSTACK.lower)
    begin, end = ("<user>", "</end><assistant>") if chat else ("<bos>", "")

    def build(seed=9, depth=50):
        return build_prompt(task, tokenizer, HAYSTACK, 1213, depth, seed=seed)

    prompt = build()
    # The expected tokens continue a text: no BOS.
    assert tokenizer.decode(prompt.expected[0]) == f" {', '.join(riddle.answers)}"
    assert prompt.answers == riddle.answers and prompt.new_tokens == TASKS[task].new_tokens
    # One token a byte: the next word, of at most 9 letters, a stop and a space, does not fit.
    assert 0 <= 1213 - prompt.new_tokens - prompt.input_ids.shape[1] <= 11
    text = str(tokenizer.decode(prompt.input_ids[0]))
    assert text.startswith(f"{begin}{riddle.intro}\n")
    assert text.endswith(f"\n{riddle.question}{end or ' '}{riddle.lead}")
    places = [text.index(needle) for needle in riddle.needles]
    assert places == sorted(places)
    for once in (riddle.question, *riddle.needles, *riddle.distractors):
        assert text.count(once) == 1
    # One needle is at the depth, where a sentence begins; the others are anywhere.
    first, last = (str(tokenizer.decode(build(depth=x).input_ids[0])) for x in (0, 100))
    assert first.partition(riddle.needles[0])[0].endswith(f"{riddle.intro}\n")
    assert len(last.partition(riddle.needles[-1])[2].partition("\n")[0]) < 120
    drawn = [build(seed=seed).input_ids.tolist() for seed in (9, 9, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
