"""`h2o-prefill visualize` from its arguments to its figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SIZES = ("--context", 64, "--chunk-size", 16, "--local-window", 4, "--heavy-budget", 4)
FIGURES = ("memory", "scores", "sinks", "heavy")


@pytest.fixture
def visualize(run: Run, model_folder: str, text_file: str, tmp_path: Path) -> Run:
    """Run `visualize` on the small model; later arguments win over these."""
    pytest.importorskip("matplotlib")
    given = ("--model", model_folder, "--text-file", text_file, "--output", tmp_path / "out")
    return lambda *arguments: run("visualize", *given, *SIZES, *arguments)


def test_the_figures_are_written_and_named(visualize: Run, tmp_path: Path) -> None:
    done = visualize("--threads", 1)
    assert done.exit_code == 0, done.output
    paths = [tmp_path / "out" / f"{name}.png" for name in FIGURES]
    assert done.stdout.split() == [str(path) for path in paths]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert done.stderr == ""


def test_options_reach_the_run(visualize: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(
        model: Any, input_ids: Any, config: Any, output: Any, title: str, **rest: Any
    ) -> Any:
        seen.update(model=model, input_ids=input_ids, config=config, title=title)
        raise ValueError("seen")

    monkeypatch.setattr("h2o_prefill.eval.visualize_attention_patterns", record)
    done = visualize("--window", 2, "--sink-tokens", 3, "--dtype", "bfloat16", "--context", 48)
    assert "seen" in done.stderr
    assert str(seen["model"].dtype) == "torch.bfloat16"
    assert seen["config"].sink_tokens == 3
    assert "window 2 of 48 tokens" in seen["title"]
    # One token a byte, of a sentence that repeats: token = byte's place, so windows differ.
    sentence = "Sphinx of black quartz, judge my vow. " * 10
    (ids,) = seen["input_ids"].tolist()
    spaces = [i for i, token in enumerate(ids) if token == ids[sentence[96:144].index(" ")]]
    assert spaces == [i for i, letter in enumerate(sentence[96:144]) if letter == " "]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", 31), "context must hold at least two chunks of 16 tokens, got 31"),
        (("--context", 49), "context must not end one token after a chunk"),
        (("--window", 99), "windows must be a slice within 0:"),
        (("--window", -1), "--window"),
        (("--text-file", "missing.txt"), "text_file: no such file: 'missing.txt'"),
        (("--dataset", "c4"), "dataset must be one of"),
        (("--output", __file__), "--output must be a folder, got the file"),
        (("--model", "./nowhere"), "model: no such file or folder: './nowhere'"),
        (("--heavy-budget", -1), "heavy_budget must be >= 0, got -1"),
        (("--preset", "best"), "preset must be one of"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    visualize: Run, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    done = visualize(*arguments)
    assert done.exit_code == 2
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
