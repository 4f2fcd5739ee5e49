"""Windows in which a passage comes again: their parts, and what each form keeps of the passage."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_RNG = random.Random(0)
_WORDS = ["".join(_RNG.choices("abcdefgh", k=_RNG.randint(3, 9))) for _ in range(80)]
TEXT = " ".join(f"{word.capitalize()}, the looking path." for word in _RNG.choices(_WORDS, k=2000))
CONTEXT = 2048


@pytest.fixture
def kinds(import_path: None) -> Any:
    from common import variations

    return variations.VARIATIONS


def test_a_window_is_passage_other_text_and_changed_passage(tiny: Any, kinds: Any) -> None:
    from common.variations import build_window

    tokenizer = tiny.make_tokenizer()
    for name, kind in kinds.items():
        window, changed = build_window(name, tokenizer, TEXT, CONTEXT)
        assert window.tolist() == build_window(name, tokenizer, TEXT, CONTEXT)[0].tolist()
        assert len(window) == CONTEXT
        # Never more than a quarter, and only what a form leaves out is missing.
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


def test_the_forms_of_prose(kinds: Any) -> None:
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
        assert kinds[name].passage(prose) == prose
        assert kinds[name].change(prose) == form


def test_code_keeps_its_syntax_and_loses_its_names(kinds: Any) -> None:
    code = 'import os\ndef f(count, *rest):\n    """Say f."""\n    return os.sep * len(count)\nf(2'
    renamed = kinds["renamed_code"].change(code)
    assert renamed == (
        'import item0\ndef item1(item2, *item3):\n    """Say f."""\n'
        "    return item0.item4 * len(item2)\n"
    )
    source = kinds["renamed_code"].passage("")
    assert len(source) > 50_000
    again = kinds["renamed_code"].change(f"{source}\n")
    nodes = [[type(node) for node in ast.walk(ast.parse(text))] for text in (source, again)]
    assert nodes[0] == nodes[1]


def test_the_forms_of_a_table_have_the_same_cells(kinds: Any) -> None:
    table = kinds["table_columns"].passage(TEXT[:2000])
    rows = [line.split(" | ") for line in table.splitlines()]
    assert len(rows) == 2000 // 64 and {len(row) for row in rows} == {5}
    half = table[: table.index("\n", 300) + 7]  # with the beginning of a further row
    whole = half.count("\n")
    columns = kinds["table_columns"].change(half)
    assert [line.split(" | ")[::-1] for line in columns.splitlines()] == rows[:whole]
    records = kinds["table_records"].change(half).splitlines()
    assert [list(json.loads(line).values()) for line in records] == rows[:whole]
    sentences = kinds["table_sentences"].change(half).removesuffix(".").split(". ")
    assert len(sentences) == whole
    for sentence, row in zip(sentences, rows, strict=False):
        assert all(cell in sentence for cell in row)


def test_a_log_comes_again_with_few_fields_changed(kinds: Any) -> None:
    log = kinds["log"].passage(TEXT[:2000])
    again = kinds["log"].change(log).splitlines()[::-1]
    lines = log.splitlines()
    assert len(again) == len(lines) - 1
    for before, after in zip(lines, again, strict=False):
        pairs = list(zip(before.split(), after.split(), strict=True))
        assert [index for index, (old, new) in enumerate(pairs) if old != new] == [0, 1, 7]


def test_rows_of_the_benchmark(run: Callable[..., Any], model_folder: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = ("--model", model_folder, "--text-file", text, "--forms", "same,capitals")
    _, report = run("variations", *given, "--variant", "h2o,local_window=8,heavy_budget=8")
    assert [row["form"] for row in report["results"]] == ["same", "capitals"]
    for row in report["results"]:
        assert 0 < row["changed_tokens"] <= 64
        # All of the passage comes after the first chunk, which is exact.
        assert row["changed_kl"] > row["kl"] > 0
