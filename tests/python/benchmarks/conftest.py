"""What the tests of the benchmarks share."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import load_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make modules importable as they are when a benchmark runs as a script."""
    pytest.importorskip("typer")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Run "program command" with --quick; return what it printed and its JSON."""
    from typer.testing import CliRunner

    def run_benchmark(name: str, *arguments: object) -> tuple[Any, dict[str, Any]]:
        program, *command = name.split()
        file = tmp_path / f"{[program, *command][-1]}.json"
        words = [*command, "--quick", "--json", str(file), *map(str, arguments)]
        app = importlib.import_module(program).app
        done = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done, json.loads(file.read_text(encoding="utf-8"))

    return run_benchmark


@pytest.fixture
def model(model_folder: str) -> Any:
    return load_model(model_folder)[0]


@pytest.fixture
def config() -> PrefillConfig:
    """The settings of quick runs."""
    return PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
