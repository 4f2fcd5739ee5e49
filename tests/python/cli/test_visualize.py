"""`h2o-prefill visualize` from its arguments to its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def visualize(
    run: Callable[..., Any], small_commands: dict[str, Any], tmp_path: Path
) -> Callable[..., Any]:
    """Run `visualize` on the small model; later arguments win over these."""
    pytest.importorskip("matplotlib")
    given = (*small_commands["visualize"], "--output", tmp_path / "out")
    return lambda *arguments: run(*given, *arguments)


def test_the_table_the_figures_and_the_report(
    visualize: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    done = visualize("--json", file, "--window", 1, "--sink-tokens", 1)
    assert done.exit_code == 0, done.output
    assert done.stderr == f"wrote {file}\n"
    *lines, memory, errors, _ = done.stdout.split("\n")
    assert [memory, errors] == [str(tmp_path / "out" / f"{n}.png") for n in ("memory", "errors")]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in (memory, errors))
    assert "window 1 of 64 tokens, S=16 L=4 H=4 K=1" in " ".join(done.stdout.split())

    assert all(len(line) <= 80 for line in lines[1:])
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert all(str(chunk) in rows for chunk in range(4))  # a row a chunk
    # Error 0, and all of the mass: the first chunk is exact.
    assert rows["0"][1:3] == ["0.00", "%"] and rows["0"][6:8] == ["100.00", "%"]
    assert float(rows["1"][1]) > 0 and rows["1"][-1] == "-" and 0 <= float(rows["2"][-1]) <= 1
    assert rows["all"][2] == "%"

    report = json.loads(file.read_text())
    config = {"sink_tokens": 1, "window": 1, "context": 64, "dataset": "text.txt"}
    assert report["config"].items() >= config.items() and "torch" in report["environment"]
    assert [row["layer"] for row in report["by_layer"]] == [0, 1]
    assert len(report["by_layer"][0]["l1_error"]) == 4
    assert 0 < report["summary"]["mass_recall_mean"] < 1


def test_without_errors_there_is_no_table(visualize: Callable[..., Any], tmp_path: Path) -> None:
    done = visualize("--no-errors")
    assert done.stdout == f"{tmp_path / 'out' / 'memory.png'}\n"


def test_the_window_and_the_dtype_reach_the_run(
    visualize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def record(*arguments: Any, **rest: Any) -> Any:
        seen.extend(arguments)
        raise ValueError("seen")

    monkeypatch.setattr("h2o_prefill.eval.visualize_attention_patterns", record)
    assert "seen" in visualize("--window", 2, "--dtype", "bfloat16", "--context", 48).stderr
    model, input_ids, *_ = seen
    assert str(model.dtype) == "torch.bfloat16"
    # One token a byte, of a sentence that repeats: token = byte's place, so windows differ.
    sentence = "Sphinx of black quartz, judge my vow. " * 10
    (ids,) = input_ids.tolist()
    spaces = [i for i, token in enumerate(ids) if token == ids[sentence[96:144].index(" ")]]
    assert spaces == [i for i, letter in enumerate(sentence[96:144]) if letter == " "]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", 31), "context must hold at least two chunks of 16 tokens, got 31"),
        (("--context", 49), "context must not end one token after a chunk"),
        (("--window", 99), "windows must be a slice within 0:"),
        (("--output", __file__), "--output must be a folder, got the file"),
        (("--preset", "h2o,recall=2,recall_block=12"), "chunk_size must be a multiple of recall_b"),
        (("--json", "x.json", "--no-errors"), "--json holds the errors"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    visualize: Callable[..., Any],
    tmp_path: Path,
    refused: Any,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    refused(visualize(*arguments), message)
    assert not (tmp_path / "out").exists()
