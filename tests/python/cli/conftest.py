"""Fixtures of the tests of the command line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def text_file(tiny: Any, tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(tiny.SENTENCE * 10)
    return str(path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command line; the result has exit_code, stdout and stderr.

    Every table that it prints must lose no word on terminals of any width.
    """
    testing = pytest.importorskip("typer.testing")
    from h2o_prefill.cli import tables
    from h2o_prefill.cli.app import app

    print_result = tables.print_result

    def print_and_check(title: str, table: Any) -> None:
        print_result(title, table)
        texts = [text for column in table.columns for text in (column.header, *column.cells)]
        # Longer words do not fit into the narrowest column.
        words = {word for text in texts for word in str(text).split() if len(word) <= 12}
        for width in (40, 120):
            with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
                patch.setenv("COLUMNS", str(width))
                print_result(title, table)
            text = shown.getvalue()
            assert words <= set(text.split()) and "\u2026" not in text

    monkeypatch.setattr(tables, "print_result", print_and_check)
    monkeypatch.delenv("H2O_PREFILL_DEBUG", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return lambda *arguments: testing.CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def refused() -> Callable[[Any, str], None]:
    """Check that a command line was refused as wrong input, in one line and before any result."""

    def check(done: Any, message: str) -> None:
        assert done.exit_code == 2, done.exception
        assert re.search(message, done.stderr), done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert done.stdout == ""

    return check


PRESET = "h2o,chunk_size=16,local_window=4,heavy_budget=4"


@pytest.fixture
def small_commands(model_folder: str, text_file: str, tiny: Any, tmp_path: Path) -> dict[str, Any]:
    """The arguments of every command that runs a model, for a run of a moment, by its name."""
    long_text = tmp_path / "long.txt"
    long_text.write_text(tiny.SENTENCE * 60)
    model = ("--model", model_folder, "--threads", "1")
    text = (*model, "--text-file", text_file, "--context", "64")
    haystack = (*model, "--text-file", str(long_text), "--tasks", "single", "--lengths", "480")
    sizes = ("--chunk-size", "16", "--local-window", "4", "--heavy-budget", "0,4")
    variant = ("--preset", "h2o,chunk_size=64,local_window=16,heavy_budget=16")
    return {
        "compare": ("compare", *text, "--repeats", "1", "--preset", PRESET),
        "ppl": ("ppl", *text, "--windows", "0:2", "--preset", PRESET),
        "bench": ("bench", *model, "--lengths", "16,48", "--runs", "1", "--preset", PRESET),
        "ablate": ("ablate", *text, "--windows", "0:2", "--preset", "h2o", *sizes),
        "retrieve": ("retrieve", *haystack, "--depths", "0,100", *variant),
        "visualize": ("visualize", *text, "--preset", PRESET),
        "generate": ("generate", *model, "--max-new-tokens", "5", "--preset", PRESET),
        "info": ("info",),
    }
