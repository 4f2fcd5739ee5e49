"""Windows in which a passage comes again: their parts, and what each form keeps of the passage."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

import pytest

from h2o_prefill.eval.inputs.variations import VARIATIONS, build_window

_RNG = random.Random(0)
_WORDS = ["".join(_RNG.choices("abcdefgh", k=_RNG.randint(3, 9))) for _ in range(80)]
TEXT = " ".join(f"{word.capitalize()}, the looking path." for word in _RNG.choices(_WORDS, k=2000))
CONTEXT = 2048


def _parts(tokenizer: Any, name: str) -> tuple[str, str, str]:
    """Return the passage, what stands between, and the changed passage; a token is a byte."""
    window, changed = build_window(name, tokenizer, TEXT, CONTEXT)
    text = str(tokenizer.decode(window))
    return text[: CONTEXT // 4], text[CONTEXT // 4 : changed], text[changed:]


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_window_is_passage_other_text_and_changed_passage(tiny_tokenizer: Any, name: str) -> None:
    window, changed = build_window(name, tiny_tokenizer, TEXT, CONTEXT)
    assert window.tolist() == build_window(name, tiny_tokenizer, TEXT, CONTEXT)[0].tolist()
    assert len(window) == CONTEXT
    # Never more than a quarter, and only what a form leaves out is missing.
    assert CONTEXT // 8 < CONTEXT - changed <= CONTEXT // 4
    passage, between, again = _parts(tiny_tokenizer, name)
    assert again.startswith("\n\n")
    assert (again.strip() in passage) == (name == "same")
    if not VARIATIONS[name].among_its_like:
        assert between in TEXT and passage not in between


def test_the_forms_of_prose() -> None:
    prose = "He thought: is the wheel loose? In passing, all day,\nsick seamen looked."
    expected = {
        "same": prose,
        "capitals": "HE THOUGHT: IS THE WHEEL LOOSE? IN PASSING, ALL DAY,\nSICK SEAMEN LOOKED.",
        "spelling": "He dhowght: is dhe weel luse? In pasing, al day,\nsik seemen luked.",
        "spacing": "He  thought  :  is  the  wheel  loose  ?  In  passing  ,  all  day  ,  \n"
        "sick  seamen  looked  .  ",
        "line_breaks": "He thought: is the wheel\nloose? In passing, all\nday, sick seamen looked.",
        "punctuation": "He thought is the wheel loose In passing all day\nsick seamen looked",
    }
    for name, form in expected.items():
        assert VARIATIONS[name].passage(prose) == prose
        assert VARIATIONS[name].change(prose) == form


def test_code_keeps_its_syntax_and_loses_its_names() -> None:
    code = 'import os\ndef f(count, *rest):\n    """Say f."""\n    return os.sep * len(count)\nf(2'
    renamed = VARIATIONS["renamed_code"].change(code)
    assert renamed == (
        'import item0\ndef item1(item2, *item3):\n    """Say f."""\n'
        "    return item0.item4 * len(item2)\n"
    )
    source = VARIATIONS["renamed_code"].passage("")
    assert len(source) > 50_000
    again = VARIATIONS["renamed_code"].change(f"{source}\n")
    kinds = [[type(node) for node in ast.walk(ast.parse(text))] for text in (source, again)]
    assert kinds[0] == kinds[1]


def test_the_forms_of_a_table_have_the_same_cells() -> None:
    table = VARIATIONS["table_columns"].passage(TEXT[:2000])
    rows = [line.split(" | ") for line in table.splitlines()]
    assert len(rows) == 2000 // 64 and {len(row) for row in rows} == {5}
    half = table[: table.index("\n", 300) + 7]  # with the beginning of a further row
    whole = half.count("\n")
    columns = VARIATIONS["table_columns"].change(half)
    assert [line.split(" | ")[::-1] for line in columns.splitlines()] == rows[:whole]
    records = VARIATIONS["table_records"].change(half).splitlines()
    assert [list(json.loads(line).values()) for line in records] == rows[:whole]
    sentences = VARIATIONS["table_sentences"].change(half).removesuffix(".").split(". ")
    assert len(sentences) == whole
    for sentence, row in zip(sentences, rows, strict=False):
        assert all(cell in sentence for cell in row)


def test_a_log_comes_again_with_few_fields_changed() -> None:
    log = VARIATIONS["log"].passage(TEXT[:2000])
    again = VARIATIONS["log"].change(log).splitlines()[::-1]
    lines = log.splitlines()
    assert len(again) == len(lines) - 1
    for before, after in zip(lines, again, strict=False):
        pairs = list(zip(before.split(), after.split(), strict=True))
        assert [index for index, (old, new) in enumerate(pairs) if old != new] == [0, 1, 7]


def test_a_text_that_is_too_short(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"longer for windows of 2048 tokens: 1000 characters"):
        build_window("capitals", tiny_tokenizer, TEXT[:1000], CONTEXT)
