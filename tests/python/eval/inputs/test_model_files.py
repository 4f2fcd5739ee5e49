"""Models with a broken file: the error names it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from h2o_prefill.eval import load_model


@pytest.fixture
def model_folder(tiny: ModuleType, tmp_path: Path) -> Path:
    return Path(tiny.save_model(tmp_path))


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_cut_weights(model_folder: Path, share: float) -> None:
    file = model_folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"model\.safetensors', incomplete download\?") as raised:
        load_model(str(model_folder))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_broken_json(model_folder: Path, name: str, text: str) -> None:
    (model_folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"cannot read '.*/{name}', incomplete download"):
        load_model(str(model_folder))


def test_a_tokenizer_that_is_json_and_no_tokenizer(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"cannot read '.*tokenizer\.json'"):
        load_model(str(model_folder))


def test_a_folder_without_tokenizer(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_model(str(model_folder))


def test_cut_weights_of_a_pickle(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(1000)}, model_folder / "pytorch_model.bin")
    whole = (model_folder / "pytorch_model.bin").read_bytes()
    (model_folder / "pytorch_model.bin").write_bytes(whole[:1000])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin', incomplete download"):
        load_model(str(model_folder))


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 3), ("hidden_size", 32)])
def test_weights_of_another_model_are_refused(model_folder: Path, field: str, value: int) -> None:
    file = model_folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ValueError, match=r"missing or have other shapes, first "):
        load_model(str(model_folder))


def test_an_unknown_architecture_is_one_line(model_folder: Path) -> None:
    file = model_folder / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"abacus"'))
    with pytest.raises(ValueError, match=r"cannot load '.*`abacus`") as raised:
        load_model(str(model_folder))
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("offline")
def test_a_cut_file_among_those_of_the_hub(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    (cached / "snapshots" / "0123").symlink_to(model_folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (model_folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"snapshots/0123/model\.safetensors', incomplete"):
        load_model("some/model")


def _write_gguf(file: Path, architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("a name as long as files are" * 100)
    writer.add_tensor("weight", torch.ones(100).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("size", [0, 3, 30, 2000])
def test_a_cut_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv("H2O_PREFILL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    _write_gguf(file, "llama")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.gguf as a GGUF model, incomplete download"):
        load_model(str(file))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_whole_gguf_file_that_transformers_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2O_PREFILL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    _write_gguf(file, "perceptron")
    with pytest.raises(ValueError, match=r"model\.gguf as a GGUF model \(.*perceptron"):
        load_model(str(file))
