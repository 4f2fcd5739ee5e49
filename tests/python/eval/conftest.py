"""Fixtures of the tests of the evaluation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from h2o_prefill.config import PrefillConfig


@pytest.fixture(scope="session")
def small_config() -> PrefillConfig:
    return PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)


@pytest.fixture(scope="session")
def wikitext2_path() -> Path:
    path = os.environ.get("H2O_PREFILL_WIKITEXT2")
    if not path:
        pytest.skip("needs wiki.test.raw: set H2O_PREFILL_WIKITEXT2")
    return Path(path)
