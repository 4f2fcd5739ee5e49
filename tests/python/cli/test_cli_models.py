"""`h2o-prefill models` from its arguments to its table and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
CLASSES = ("--class", "LlamaForCausalLM", "--class", "BertLMHeadModel")


def test_one_table_and_the_files(run: Run, tmp_path: Path) -> None:
    page, report = tmp_path / "models.md", tmp_path / "models.json"
    done = run("models", *CLASSES, "--markdown", page, "--json", report, "--threads", 1)
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM" in done.stdout and "2 / 2" in done.stdout
    assert "not causal" in done.stdout
    rows = {row["name"]: row for row in json.loads(report.read_text())["models"]}
    assert (
        rows["LlamaForCausalLM"]["result"] == "sparse" and rows["LlamaForCausalLM"]["wrong"] == []
    )
    assert rows["BertLMHeadModel"]["result"] == "dense"
    text = page.read_text()
    assert text.startswith("# ") and "2 classes: 1 sparse, 1 dense, 0 refused, 0 not run" in text
    assert "| `LlamaForCausalLM` | causal | 2 / 2 |" in text


def test_a_class_that_differs_from_stock_ends_with_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_prefill.eval.compatibility.sweep.TOLERANCE", 1e-12)
    done = run("models", "--class", "LlamaForCausalLM", "--threads", 1)
    assert done.exit_code == 1
    assert "WRONG" in done.stdout
    assert "error: enabled and stock models differ: LlamaForCausalLM" in done.stderr


def test_an_unknown_class_and_a_page_that_cannot_be_written_are_refused(
    run: Run, tmp_path: Path
) -> None:
    done = run("models", "--class", "Llama")
    assert done.exit_code == 2 and "'Llama' is no model class" in done.stderr
    done = run("models", *CLASSES, "--markdown", tmp_path / "missing" / "models.md")
    assert done.exit_code == 2 and "--markdown must be a file" in done.stderr
