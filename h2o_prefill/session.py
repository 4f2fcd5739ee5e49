"""Session files: a prompt with keys, values and states, for caches and packages alike.

A session file is a safetensors file, so it holds no code, and is read by memory map. docs/cpp.md
has its tensors and its metadata. Equal sessions are equal files.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import PrefillState

VERSION = 1
_KEY = "h2o_prefill.session"
_HEADER = {"version": int, "model": str, "settings": str, "dtype": str, "length": int}

# Names of dtypes in safetensors. Keys of other dtypes have no kernels.
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}

_Native = torch.classes.h2o_prefill.PrefillConfig
_Tracker = torch.classes.h2o_prefill.MemorySetTracker


@dataclass(frozen=True)
class SessionLayer:
    """Keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] of a layer, and its state, if it has one."""

    key: Tensor
    value: Tensor
    state: PrefillState | None


@dataclass(frozen=True)
class Session:
    """What a session file holds. The tensors of one that was read are on the CPU."""

    model: str
    settings: str  # all fields, see `settings_fields`
    length: int
    token_ids: Tensor | None  # int64 [B, length]
    layers: list[SessionLayer]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a session file whole or not at all.

        Takes a copy of keys and values that are not contiguous, as those of a cache with room for
        more. Raises OSError if the file cannot be written, ValueError if the session is not one
        that can be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target = Path(path).expanduser()
        if target.exists() and not target.is_file():
            raise ValueError(f"session must be a regular file, got {str(path)!r}")
        tensors = self._tensors()
        dtype = str(self.layers[0].key.dtype).removeprefix("torch.")
        values = (VERSION, self.model, self.settings, dtype, self.length)
        header = dict(zip(_HEADER, values, strict=True))
        shapes = {name: (_code(x), list(x.shape)) for name, x in tensors.items()}
        _check_shapes(header, shapes)
        _checked(header, tensors)
        text = json.dumps(header, separators=(",", ":"))
        with replaced_file(target) as scratch:
            scratch.touch()
            mode = scratch.stat().st_mode
            try:
                # It writes another file and renames it, which only its owner may read.
                save_file(tensors, scratch, metadata={_KEY: text})
            except SafetensorError as error:
                raise OSError(None, str(error)) from error
            scratch.chmod(mode)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Session:
        """Read a session file; keys and values are a private memory map of it.

        All but the numbers in keys and values is checked. A file that is mapped may be replaced or
        removed, but not be changed in place.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no session file, was cut or changed, or is of another version. In one line.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"session: no such file: {str(path)!r}")
        try:
            with safe_open(file, framework="pt") as opened:
                header = _header(opened.metadata())
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                shapes = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
                _check_shapes(header, shapes)
                tensors = {name: opened.get_tensor(name) for name in shapes}
            layers = _checked(header, tensors)
        except (SafetensorError, ValueError, RuntimeError, OSError) as error:
            raise ValueError(f"session {str(path)!r} cannot be read: {_line(error)}") from error
        ids = tensors.get("token_ids")
        return cls(header["model"], header["settings"], header["length"], ids, layers)

    def check_origin(self, model: str, settings: str | None) -> None:
        """Raise ValueError if a session is of another model, or of others than these settings."""
        if self.model != model:
            raise ValueError(f"it must be of this model, {model}, got one of {self.model}")
        here, there = (settings_text(x) for x in (settings or self.settings, self.settings))
        if here != there:
            raise ValueError(f"its settings must be {here}, got {there}")

    def _tensors(self) -> dict[str, Tensor]:
        begins = [
            0 if layer.state is None else layer.state.last_chunk_begin for layer in self.layers
        ]
        tensors = {"last_chunk_begin": torch.tensor(begins)}
        if self.token_ids is not None:
            tensors["token_ids"] = self.token_ids
        for number, layer in enumerate(self.layers):
            tensors[f"layers.{number}.key"] = layer.key
            tensors[f"layers.{number}.value"] = layer.value
            if layer.state is not None:
                # Tokens that came densely have score 0, with or without it in the state.
                more = self.length - layer.state.scores.shape[2]
                scores = torch.nn.functional.pad(layer.state.scores, (0, more))
                tensors[f"layers.{number}.scores"] = scores
                tensors[f"layers.{number}.memory"] = layer.state.memory
                tensors[f"layers.{number}.errors"] = layer.state.errors
        return {name: x.detach().to("cpu").contiguous() for name, x in tensors.items()}


def settings_fields(config: PrefillConfig) -> str:
    """Return settings as a session file has them: with every field, whatever presets become."""
    return str(config.native.to_fields())


def settings_text(fields: str) -> str:
    """Return the shortest text for settings that are written with every field."""
    return str(_Native.parse(fields).to_string())


def _header(metadata: dict[str, str] | None) -> dict[str, Any]:
    """Return the header in the metadata of a file, whose entries have their types."""
    text = (metadata or {}).get(_KEY)
    if text is None:
        raise ValueError("it is no session file")
    header = json.loads(text)
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise ValueError(f"its version must be {VERSION}")
    if {name: type(value) for name, value in header.items()} != _HEADER:
        raise ValueError(f"its header must have {', '.join(_HEADER)} and nothing else")
    if header["dtype"] not in _CODES or header["length"] < 1:
        raise ValueError(
            f"its dtype must be one of {', '.join(_CODES)} and its length >= 1, got "
            f"{header['dtype']!r} and {header['length']}"
        )
    return header


def _code(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return {**_CODES, "int64": "I64", "int32": "I32"}.get(name, name)


def _check_shapes(header: dict[str, Any], shapes: dict[str, tuple[str, list[int]]]) -> None:
    """Raise ValueError unless a file has the tensors of a session, by their dtypes and shapes."""
    left, length, code = dict(shapes), header["length"], _CODES.get(header["dtype"], "")

    def take(name: str, dtype: str, *sizes: int | None) -> list[int]:
        """Return the shape of a tensor, in which None stands for any size."""
        kind, shape = left.pop(name, ("nothing", []))
        same = len(shape) == len(sizes) and all(
            size in (None, given) for size, given in zip(sizes, shape, strict=True)
        )
        if kind != dtype or not same:
            wanted = ", ".join("*" if size is None else str(size) for size in sizes)
            raise ValueError(f"{name} must be {dtype} [{wanted}], got {kind} {shape}")
        return shape

    (layers,) = take("last_chunk_begin", "I64", None)
    # Every layer has keys and values, so a file cannot name more of them than it holds.
    if not 1 <= layers <= len(left) // 2:
        raise ValueError(f"last_chunk_begin must be of all layers, got {layers}")
    batch = None
    for layer in range(layers):
        prefix = f"layers.{layer}."
        key = take(prefix + "key", code, batch, None, None, None)
        batch, heads, rows, _ = key
        value = take(prefix + "value", code, batch, heads, rows, None)
        if min(*key, *value) < 1 or rows > length:
            raise ValueError(f"{prefix}key and value must have 1 to {length} tokens, got {key}")
        if any(prefix + name in left for name in ("scores", "memory", "errors")):
            wide = "F64" if code == "F64" else "F32"
            _, heads, _ = take(prefix + "scores", wide, batch, None, length)
            take(prefix + "memory", "I32", batch, heads, None)
            take(prefix + "errors", "F32", batch, heads, 4)
    if "token_ids" in left:
        take("token_ids", "I64", batch, length)
    if left:
        raise ValueError(f"{min(left)} must not be there")


def _checked(header: dict[str, Any], tensors: dict[str, Tensor]) -> list[SessionLayer]:
    """Return the layers of a session, or raise ValueError or RuntimeError for impossible states.

    The states are copies.
    """
    begins = tensors["last_chunk_begin"].tolist()
    # The checks of C++: budgets of each layer, and positions in memory sets.
    tracker = _Tracker.for_config(len(begins), _Native.parse(header["settings"]))
    layers = []
    for number, begin in enumerate(begins):
        prefix, state = f"layers.{number}.", None
        scores = tensors.get(prefix + "scores")
        if scores is None and begin != 0:
            raise ValueError(f"last_chunk_begin of layer {number} must be 0, got {begin}")
        if scores is not None:
            errors = tensors[prefix + "errors"]
            if not (scores.isfinite().all() and errors.isfinite().all() and scores.min() >= 0):
                raise ValueError(f"scores and errors of layer {number} must be finite and >= 0")
            tracker.update(number, scores, tensors[prefix + "memory"], begin, errors)
            held = (tracker.scores(number), tracker.indices(number))
            state = PrefillState(*held, header["length"], begin, tracker.errors(number))
        layers.append(SessionLayer(tensors[prefix + "key"], tensors[prefix + "value"], state))
    return layers


def _line(error: BaseException) -> str:
    """Return the first line of an error; those of C++ go on with where they were raised."""
    return (str(error).splitlines() or [type(error).__name__])[0]
