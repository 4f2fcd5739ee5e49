"""What the tests of the benchmarks share."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make modules importable as they are when a benchmark runs as a script."""
    pytest.importorskip("typer")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Run a benchmark with --quick; return what it printed and its JSON."""
    from typer.testing import CliRunner

    def run_benchmark(name: str, *arguments: object) -> tuple[Any, dict[str, Any]]:
        file = tmp_path / f"{name}.json"
        app = importlib.import_module(f"bench_{name}").app
        words = ["--quick", "--json", str(file), *map(str, arguments)]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done, json.loads(file.read_text(encoding="utf-8"))

    return run_benchmark


@pytest.fixture(scope="session")
def model_folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model of two layers."""
    return str(tiny.save_model(tmp_path_factory.mktemp("benchmark_model")))
