"""`h2o-prefill bench` from its arguments to its table and file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SIZES = ("--chunk-size", 16, "--local-window", 4, "--heavy-budget", 4)


@pytest.fixture
def bench(run: Run, model_folder: str) -> Run:
    """Run `bench` on the small model; later arguments win over these."""
    pytest.importorskip("pandas")
    return lambda *arguments: run(
        *("bench", "--model", model_folder, "--lengths", "16,48", "--runs", 2, *SIZES, *arguments)
    )


def test_one_table_and_the_file(bench: Run, tmp_path: Path) -> None:
    done = bench(
        "--preset", "h2o", "--json", tmp_path / "b.json", "--threads", 1, "--dtype", "bfloat16"
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "b.json").read_text())
    assert [row["seq_length"] for row in report["results"]] == [16, 48]
    assert report["config"]["chunk_size"] == 16
    assert (report["config"]["dtype"], report["config"]["preset"]) == ("bfloat16", "h2o")
    assert report["environment"]["threads"] == 1
    lines = [line for line in done.stdout.splitlines() if re.match(r"\s+\d+\s", line)]
    assert len(lines) == 2
    for line, row in zip(lines, report["results"], strict=True):
        shown = [float(number) for number in re.findall(r"\d+\.?\d*", line)]
        assert shown[0] == row["seq_length"] and row["num_runs"] == 2
        assert shown[1] == pytest.approx(row["dense_seconds"], abs=5e-4)
        assert shown[2] == pytest.approx(row["sparse_seconds"], abs=5e-4)
        assert shown[3] == pytest.approx(row["dense_tokens_per_second"], abs=0.5)
        assert shown[4] == pytest.approx(row["sparse_tokens_per_second"], abs=0.5)
        assert shown[5] == pytest.approx(row["speedup"], abs=5e-3)
        assert shown[6:8] == pytest.approx([row["speedup_min"], row["speedup_max"]], abs=5e-3)
        assert shown[8] == pytest.approx(row["attention_flops_ratio"], abs=5e-3)
    assert "warning" not in done.output.lower()
    assert "\u2026" not in done.stdout, "rich cut a cell off at 80 columns"


def test_figures_of_throughput_and_memory(bench: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "results"
    done = bench("--output", folder, "--json", tmp_path / "b.json")
    assert done.exit_code == 0, done.output
    names = ["memory_profile.png", "throughput_comparison.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    memory = json.loads((tmp_path / "b.json").read_text())["memory"]
    assert [row["seq_length"] for row in memory] == [16, 48]
    assert all(row["sparse_peak_bytes"] > row["kv_cache_bytes"] > 0 for row in memory)
