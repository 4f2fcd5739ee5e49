"""`h2o-prefill visualize` from its arguments to its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]
Refused = Callable[[Any, str], None]
SIZES = ("--context", 64, "--chunk-size", 16, "--local-window", 4, "--heavy-budget", 4)
FIGURES = ("memory", "scores", "sinks", "heavy", "survival", "errors", "chunks")


@pytest.fixture
def visualize(run: Run, model_folder: str, text_file: str, tmp_path: Path) -> Run:
    """Run `visualize` on the small model; later arguments win over these."""
    pytest.importorskip("matplotlib")
    given = ("--model", model_folder, "--text-file", text_file, "--output", tmp_path / "out")
    return lambda *arguments: run("visualize", "--preset", "h2o", *given, *SIZES, *arguments)


def test_the_figures_are_written_and_named(visualize: Run, tmp_path: Path) -> None:
    done = visualize("--threads", 1)
    assert done.exit_code == 0, done.output
    paths = [tmp_path / "out" / f"{name}.png" for name in FIGURES]
    page = tmp_path / "out" / "index.html"
    named = done.stdout.split("\n")[-len(FIGURES) - 2 : -1]
    assert named == [str(path) for path in (*paths, page)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert page.read_text(encoding="utf-8").count("data:image/png;base64,") == len(FIGURES)
    assert done.stderr == ""
    _check_table(done.stdout.split("\n"))


def _check_table(lines: list[str]) -> None:
    assert all(len(line) <= 80 or line.endswith((".png", ".html")) for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert all(str(chunk) in rows for chunk in range(4))  # a row a chunk
    # Error 0, and all of the mass: the first chunk is exact.
    assert rows["0"][1:3] == ["0.00", "%"] and rows["0"][6:8] == ["100.00", "%"]
    assert float(rows["1"][1]) > 0 and rows["1"][-1] == "-" and 0 <= float(rows["2"][-1]) <= 1
    assert rows["all"][2] == "%"


def test_without_errors_there_is_no_table(visualize: Run, tmp_path: Path) -> None:
    done = visualize("--no-errors")
    names = [*FIGURES[:5], "index"]
    assert [Path(line).stem for line in done.stdout.split("\n")[:-1]] == names
    assert not (tmp_path / "out" / "errors.png").exists()


def test_an_ablation_of_the_model_is_drawn_too(
    visualize: Run, run: Run, model_folder: str, text_file: str, tmp_path: Path
) -> None:
    pytest.importorskip("pandas")
    given = ("--model", model_folder, "--text-file", text_file, "--windows", "0:2", *SIZES)
    done = run("ablate", "--output", tmp_path, "--no-plot", "--preset", "h2o", *given)
    assert done.exit_code == 0, done.output
    table = tmp_path / "perplexity_ablation.csv"
    picture = tmp_path / "out" / "perplexity.png"
    # Found beside the folder of the figures.
    done = visualize("--no-errors")
    assert str(picture) in done.stdout and picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    other = tmp_path / "other.csv"
    other.write_text(table.read_text().replace(f",{model_folder},", ",another,"))
    done = visualize("--no-errors", "--ablation", other)
    assert done.exit_code == 2
    assert "--ablation must hold a row of the model" in done.stderr
    other.replace(table)
    done = visualize("--no-errors")
    assert done.exit_code == 0 and not picture.exists()


def test_the_report_is_written(visualize: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = visualize("--json", file, "--preset", "h2o,recall=2,recall_block=8", "--window", 1)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "recalled.png").is_file()
    report = json.loads(file.read_text())
    assert report["environment"]["torch"] == str(torch.__version__)
    config = report["config"]
    assert config["recall"] == 2 and config["window"] == 1 and config["context"] == 64
    assert [row["layer"] for row in report["by_layer"]] == [0, 1]
    assert len(report["by_layer"][0]["l1_error"]) == 4
    assert 0 < report["summary"]["mass_recall_mean"] < 1
    assert done.stderr == f"wrote {file}\n"


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
        (("--dataset", "c4"), "dataset must be one of"),
        (("--output", __file__), "--output must be a folder, got the file"),
        (("--heavy-budget", -1), "heavy_budget must be >= 0, got -1"),
        (
            ("--preset", "h2o,recall=2,recall_block=12"),
            "chunk_size must be a multiple of recall_block, got 1024 and 12",
        ),
        (("--preset", "h2o,recall=-1"), "recall must be >= 0, got -1"),
        (("--ablation", "missing.csv"), "--ablation: no such file: 'missing.csv'"),
        (("--json", "x.json", "--no-errors"), "--json holds the errors"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    visualize: Run, tmp_path: Path, refused: Refused, arguments: tuple[object, ...], message: str
) -> None:
    refused(visualize(*arguments), message)
    assert not (tmp_path / "out").exists()
