"""Which file of a model that cannot be loaded is the broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*")


def explain_failure(folder: Path, error: Exception) -> str:
    """Return one line on why the model in a folder cannot be loaded.

    Libraries name the position of a mistake, but rarely the file: each is read again by itself.

    Parameters
    ----------
    folder : Path
        Holds the model and its tokenizer, as `save_pretrained` writes them.
    error : Exception
        What loading it raised.
    """
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
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        if not isinstance(values, dict):
            raise ValueError(f"must hold an object, got a {type(values).__name__}")
    check = _CHECKS.get(path.name, _CHECKS.get(path.suffix))
    if check is not None:
        check(path)


def _check_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer

    Tokenizer.from_file(str(path))


def _check_safetensors(path: Path) -> None:
    from safetensors import safe_open

    # Reads the header, and that the file is as long as the header says.
    with safe_open(path, framework="pt"):
        pass


def _check_pickle(path: Path) -> None:
    import torch

    torch.load(path, map_location="meta", weights_only=True)


_CHECKS: dict[str, Callable[[Path], None]] = {
    "tokenizer.json": _check_tokenizer,
    ".safetensors": _check_safetensors,
    ".bin": _check_pickle,
}
