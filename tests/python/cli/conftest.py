"""Fixtures of the tests of the command line."""

from __future__ import annotations

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
    """Run a command line; the result has exit_code, stdout and stderr."""
    testing = pytest.importorskip("typer.testing")
    from h2o_prefill.cli.app import app

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
