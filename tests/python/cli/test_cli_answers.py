"""`h2o-prefill answers` from its arguments to its table and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SMALL = "h2o,chunk_size=64,local_window=16,heavy_budget=16"


@pytest.fixture
def answers(run: Run, model_folder: str, tiny: Any, tmp_path: Path) -> Run:
    """Run `answers` on the small model; later arguments win over these."""
    text = tmp_path / "text.txt"
    text.write_text(tiny.SENTENCE * 60)
    given = ("--model", model_folder, "--text-file", text, "--prompts", 2, "--new-tokens", 4)
    return lambda *arguments: run("answers", *given, "--prompt-tokens", 300, *arguments)


def test_one_table_and_the_file(answers: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    done = answers("--variant", SMALL, "--question", "Why?", "--threads", 1, "--json", file)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert list(report["summary"]) == [SMALL]
    expected = {"question": "Why?", "new_tokens": 4, "prompt_tokens": 300, "dtype": "float32"}
    assert report["config"].items() >= expected.items()
    equal = report["summary"][SMALL]["equal"]
    assert f" {equal}/2 " in done.stdout
    assert "2 prompts of 300 tokens of text.txt" in done.stdout
    assert "\u2026" not in done.stdout, "rich cut a cell off at 80 columns"


def test_errors_are_one_line(answers: Run) -> None:
    done = answers("--prompts", 9)
    assert done.exit_code == 2
    assert "the text 'text.txt' must have 9 x 300 tokens" in done.stderr
