"""Session files: a prompt with keys, values and states, for caches and packages alike.

A session file is a safetensors file, so it holds no code, and is read by memory map. docs/cpp.md
has its tensors and its metadata. Equal sessions are equal files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_prefill._errors import native_errors
from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import Checkpoint, PrefillState

_File = torch.classes.h2o_prefill.SessionFile


@dataclass(frozen=True)
class SessionLayer:
    """Keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] of a layer, and its state, if it has one.

    `checkpoints` has tensors [C, B, Hkv, ...]: checkpoint i is of (i + 1) chunks.
    """

    key: Tensor
    value: Tensor
    state: PrefillState | None
    checkpoints: Checkpoint | None = None


@dataclass(frozen=True)
class SessionFile:
    """What a session file holds. The tensors of one that was read are on the CPU."""

    model: str  # what tells models apart whose keys differ, see `identity.model_text`
    settings: str  # all fields, see `settings_fields`
    length: int
    token_ids: Tensor | None  # int64 [B, length]
    layers: list[SessionLayer]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a session file whole or not at all.

        Copies keys and values that are not contiguous, as in a cache with room for more. Raises
        OSError if the file cannot be written, ValueError if the session cannot be read back.
        """
        held = _File(self.model, self.settings, self.length, self._tensors())
        with native_errors():
            held.write(os.fspath(Path(path).expanduser()))

    @classmethod
    def read(cls, path: str | os.PathLike[str], verify: bool = True) -> SessionFile:
        """Read a session file; keys and values are a private memory map of it.

        With `verify` its checksum is checked, which reads all of it; without, all but the numbers
        in keys and values is checked. A file that is mapped may be replaced or removed, but not be
        changed in place.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no session file, was cut or changed, or is of another version. In one line.
        """
        with reads_session(path) as file:
            held = _File.read(file, verify)
        tensors, (model, settings, length) = held.tensors(), held.header()
        layers = [
            _layer(tensors, number, length, begin)
            for number, begin in enumerate(tensors["last_chunk_begin"].tolist())
        ]
        return cls(model, settings, length, tensors.get("token_ids"), layers)

    def check_origin(self, model: str, config: PrefillConfig | None) -> None:
        """Raise ValueError if a session has a different model or, if given, different settings."""
        file = _File(self.model, self.settings, 0, {})
        with native_errors():
            file.check_model(model)
            if config is not None:
                file.check_settings(settings_fields(config))

    def _tensors(self) -> dict[str, Tensor]:
        begins = [
            0 if layer.state is None else layer.state.last_chunk_begin for layer in self.layers
        ]
        tensors = {"last_chunk_begin": torch.tensor(begins)}
        if self.token_ids is not None:
            tensors["token_ids"] = self.token_ids
        for number, layer in enumerate(self.layers):
            held, state = {"key": layer.key, "value": layer.value}, layer.state
            if state is not None:
                # Tokens that came densely have score 0, with or without it in the state.
                scores = pad(state.scores, (0, self.length - state.scores.shape[2]))
                held |= {"scores": scores, "memory": state.memory, "errors": state.errors}
            if layer.checkpoints is not None:
                held |= {f"checkpoint_{x}": y for x, y in vars(layer.checkpoints).items()}
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in held.items()}
        return tensors


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a tensor's elements, which docs/cpp.md defines."""
    return int(_File.checksum(tensor))


def settings_fields(config: PrefillConfig) -> str:
    """Return settings as a session file has them: with every field, whatever presets become."""
    return str(config.native.to_fields())


def _layer(tensors: dict[str, Tensor], number: int, length: int, begin: int) -> SessionLayer:
    """Return a layer of a file that was read; state and checkpoints are copies."""
    prefix = f"layers.{number}."
    held = {x.removeprefix(prefix): y for x, y in tensors.items() if x.startswith(prefix)}
    key, value = held.pop("key"), held.pop("value")
    held, state, checkpoints = {name: x.clone() for name, x in held.items()}, None, None
    if "scores" in held:
        state = PrefillState(held["scores"], held["memory"], length, begin, held["errors"])
    if "checkpoint_memory" in held:
        names = "memory", "scores", "errors"
        checkpoints = Checkpoint(*(held[f"checkpoint_{name}"] for name in names))
    return SessionLayer(key, value, state, checkpoints)


@contextlib.contextmanager
def reads_session(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path for C++, whose errors become OSError or ValueError of one line."""
    with native_errors():
        yield os.fspath(Path(path).expanduser())
