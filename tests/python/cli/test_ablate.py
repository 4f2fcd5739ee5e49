"""`h2o-prefill ablate` from its arguments to its table and files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pd = pytest.importorskip("pandas")

Run = Callable[..., Any]
SIZES = ("--context", 64, "--chunk-size", 16, "--local-window", 4, "--heavy-budget", "0,4")


@pytest.fixture
def ablate(run: Run, model_folder: str, text_file: str, tmp_path: Path) -> Run:
    """Run `ablate` on the small model; later arguments win over these."""
    given = ("--model", model_folder, "--text-file", text_file, "--output", tmp_path / "out")
    return lambda *arguments: run("ablate", *given, "--windows", "0:2", *SIZES, *arguments)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    return tmp_path / "out" / "perplexity_ablation.csv"


def test_a_table_a_csv_file_and_a_figure(ablate: Run, csv: Path) -> None:
    pytest.importorskip("matplotlib")
    done = ablate("--sink-tokens", "0,2", "--threads", 1)
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(csv)
    assert len(frame) == 4
    lines = [line for line in done.stdout.splitlines() if " 1/" in line]
    assert len(lines) == 4
    for line, row in zip(lines, frame.to_dict(orient="records"), strict=True):
        heavy, sinks, dense, sparse = line.split()[:4]
        assert (int(heavy), int(sinks)) == (row["heavy_budget"], row["sink_tokens"])
        assert float(dense) == pytest.approx(row["dense_ppl"], abs=6e-4)
        assert float(sparse) == pytest.approx(row["sparse_ppl"], abs=6e-4)
    assert csv.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.split() == ["wrote", str(csv), "wrote", str(csv.with_suffix(".png"))]


def test_options_reach_the_run(ablate: Run, tiny: Any, csv: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(tiny.SENTENCE[::-1] * 10)
    done = ablate(
        *("--text-file", tmp_path / "other.txt", "--chunk-size", "16,40"),
        *("--recall", "2", "--recall-block", 8, "--recall-span", "1,3", "--gqa-reduce", "max"),
        *("--dense-layers", "none,0", "--heavy-budget", 4, "--dtype", "bfloat16"),
        *("--protocol", "llamacpp", "--min-prefill", 20, "--context", "48,64"),
    )
    assert done.exit_code == 0, done.output
    assert "other.txt" in done.stdout
    assert "warning: left out context=48 chunk_size=40" in done.stderr.replace("\n", " ")
    frame = pd.read_csv(csv)
    assert set(frame["dataset"]) == {"text.txt", "other.txt"}
    chosen = frame[frame["dataset"] == "text.txt"]
    chosen = chosen[["context", "dense_layers", "recall_span"]].itertuples(index=False, name=None)
    assert sorted(chosen) == list(itertools.product((48, 64), ("0", "none"), (1, 3)))
    for name, value in {
        "recall": 2,
        "recall_block": 8,
        "gqa_reduce": "max",
        "dtype": "bfloat16",
        "protocol": "llamacpp",
        "min_prefill": 20,
    }.items():
        assert set(frame[name]) == {value}


def test_without_a_figure(ablate: Run, csv: Path) -> None:
    done = ablate("--no-plot", "--recall", "0,2", "--recall-block", 8, "--heavy-budget", 4)
    assert done.exit_code == 0, done.output
    assert not csv.with_suffix(".png").exists()
    without, with_recall = (line for line in done.stdout.splitlines() if " 1/" in line)
    recalled = pd.read_csv(csv)["recalled_keys"]
    assert without.split()[-1] == "-" and recalled.isna().tolist() == [True, False]
    assert with_recall.split()[-1] == f"{recalled[1]:.0f}"


def test_a_second_run_computes_nothing(
    ablate: Run, csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ablate()
    before = csv.read_bytes()

    def never(*_: object) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr("h2o_prefill.eval.forward.PromptForward.__call__", never)
    second = ablate()
    assert second.exit_code == 0, second.output
    assert second.stdout == first.stdout
    assert csv.read_bytes() == before
