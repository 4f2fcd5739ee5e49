"""Find the broken file of a model that cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*")


def explain_failure(folder: Path, error: Exception) -> str:
    """Return one line on why the model in a folder cannot be loaded, with the broken file."""
    for path in sorted(folder.iterdir()):
        try:
            _check_file(path)
        except Exception as broken:  # tokenizers and safetensors raise classes of their own
            return f"model: cannot read {str(path)!r}, incomplete download? ({first_line(broken)})"
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        return f"model: the folder {str(folder)!r} holds no tokenizer, like tokenizer.json"
    return f"model: cannot load {str(folder)!r}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, with what a colon announces; or its class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _check_file(path: Path) -> None:
    if path.suffix == ".json":
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"must hold an object, got a {type(values).__name__}")
    if path.name == "tokenizer.json":
        from tokenizers import Tokenizer

        Tokenizer.from_file(str(path))
    elif path.suffix == ".safetensors":
        from safetensors import safe_open

        # Reads the header, and checks that the file is as long as the header says.
        with safe_open(path, framework="pt"):
            pass
    elif path.suffix == ".bin":
        import torch

        torch.load(path, map_location="meta", weights_only=True)
