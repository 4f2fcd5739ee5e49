"""Windows in which a passage comes again: their parts, and what each form keeps of the passage."""

import random

import pytest

_RNG = random.Random(0)
_WORDS = ["".join(_RNG.choices("abcdefgh", k=_RNG.randint(3, 9))) for _ in range(80)]
TEXT = " ".join(f"{word.capitalize()}, the looking path." for word in _RNG.choices(_WORDS, k=2000))
CONTEXT = 2048


@pytest.fixture
def kinds(import_path):
    from common import variations

    return variations.VARIATIONS


def test_a_window_is_passage_other_text_and_changed_passage(tiny, kinds):
    from common.variations import build_window

    tokenizer = tiny.make_tokenizer()
    for name, kind in kinds.items():
        window, changed = build_window(name, tokenizer, TEXT, CONTEXT)
        assert window.tolist() == build_window(name, tokenizer, TEXT, CONTEXT)[0].tolist()
        assert len(window) == CONTEXT
        # Never more than a quarter.
        assert CONTEXT // 8 < CONTEXT - changed <= CONTEXT // 4
        text = str(tokenizer.decode(window))  # a token is a byte
        passage, between = text[: CONTEXT // 4], text[CONTEXT // 4 : changed]
        assert text[changed:].startswith("\n\n")
        assert (text[changed:].strip() in passage) == (name == "same")
        if not kind.among_its_like:
            assert between in TEXT and passage not in between
    # A text that is too short.
    with pytest.raises(ValueError, match=r"longer for windows of 2048 tokens: 1000 characters"):
        build_window("capitals", tokenizer, TEXT[:1000], CONTEXT)
