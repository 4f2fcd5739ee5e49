"""Fixtures of the tests of the evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny: ModuleType) -> Any:
    return tiny.make_tokenizer()


@pytest.fixture
def tiny_model(tiny: ModuleType) -> Any:
    return tiny.make_model()


@pytest.fixture(scope="session")
def small_config() -> PrefillConfig:
    return PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub look out of reach, whether it is or not."""
    monkeypatch.setattr("h2o_prefill.eval.inputs.hub.hub_is_reachable", lambda timeout=0.0: False)


@pytest.fixture(scope="session")
def wikitext2_path() -> Path:
    path = os.environ.get("H2O_PREFILL_WIKITEXT2")
    if not path:
        pytest.skip("needs wiki.test.raw: set H2O_PREFILL_WIKITEXT2")
    return Path(path)
