"""GGUF files, converted once to folders that transformers loads, in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from pathlib import Path

from h2o_prefill._errors import first_line

# Part of the folder's name: a change of what is written must not find an older folder.
FORMAT = 1


def cache_dir() -> Path:
    """Return H2O_PREFILL_CACHE, else the folder h2o_prefill in XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("H2O_PREFILL_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "h2o_prefill"


def convert_gguf(path: Path) -> Path:
    """Return a folder with the model, in fp32, and the tokenizer of a GGUF file, made once."""
    folder = cache_dir() / "models" / f"{path.stem}-{_digest(path)}-{FORMAT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        converted = Path(scratch) / folder.name
        _convert(path, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _digest(path: Path) -> str:
    """Return 12 hex digits of SHA-256: files of one name and size can differ in their weights."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()[:12]


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        # The reader draws a progress bar of its own, whatever verbosity is set.
        with contextlib.redirect_stderr(io.StringIO()):
            loaded = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a cut file ends the reader anywhere
        raise ValueError(
            f"model: cannot read {str(path)!r}, incomplete download? ({first_line(error)})"
        ) from error
    # A model that came from GGUF refuses save_pretrained, with plain weights too: save a twin.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
