"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


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
    monkeypatch.setattr("h2o_prefill.eval.hub.hub_is_reachable", lambda timeout=0.0: False)
    return lambda *arguments: testing.CliRunner().invoke(app, [str(a) for a in arguments])
