"""Session files: a prompt with keys, values and states, for caches, packages and C++ alike.

A session file is one tuple in PyTorch's own container, so it holds no code; docs/cpp.md has its
form.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill._errors import first_line, native_errors
from h2o_prefill.state import LayerState

_NAME = "h2o_prefill.session"
_VERSION = 3  # as in csrc/core/session.cpp


class Session(NamedTuple):
    """What a session file holds."""

    settings: str  # all fields
    fingerprint: str  # tells models apart whose keys differ
    token_ids: Tensor | None  # int64 [B, length]
    layers: list[Any]  # LayerState of each layer, on the CPU

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a session file whole or not at all. Raises OSError if it cannot be written."""
        tensors = [[x.cpu() for x in layer.tensors()] for layer in self.layers]
        ids = torch.empty(0, 0, dtype=torch.long) if self.token_ids is None else self.token_ids
        counts = torch.tensor([len(x) for x in tensors])
        texts = _NAME, _VERSION, self.settings, self.fingerprint
        with replaced_file(path) as scratch, native_errors():
            torch.save((*texts, ids.cpu().contiguous(), counts, *chain(*tensors)), scratch)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Session:
        """Read a session file.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no session, is damaged, or is of another version.
        """
        try:
            name, version, *fields = _tuple_of(Path(path).expanduser())
            if name != _NAME:
                raise ValueError("it is no session file")
            if version != _VERSION:
                raise ValueError(f"its version must be {_VERSION}, got {version}")
            settings, fingerprint, ids, counts, *tensors = fields
            layers = []
            for count in counts.tolist():
                layers.append(LayerState.from_tensors(tensors[:count]))
                del tensors[:count]
        except (AttributeError, IsADirectoryError, RuntimeError, TypeError, ValueError) as error:
            line = first_line(error)
            raise ValueError(f"session {str(path)!r} cannot be read: {line}") from None
        return cls(settings, fingerprint, ids if ids.numel() else None, layers)


def _tuple_of(path: Path) -> tuple[Any, ...]:
    path.open("rb").close()
    try:
        with ZipFile(path) as file:  # PyTorch does not look at checksums.
            damaged = file.testzip()
        loaded = None if damaged else torch.load(path, "cpu", weights_only=True)
    except (EOFError, OSError, RuntimeError, ValueError, UnpicklingError, BadZipFile):
        loaded = None
    if not isinstance(loaded, tuple) or len(loaded) < 2:
        raise ValueError("it is no session file, or is damaged")
    return loaded
