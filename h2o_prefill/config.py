"""The settings of sparse prefill.

Defaults, rules, presets and the settings text come from the C++ class of the same name; this
dataclass adds types and documentation.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from h2o_prefill._warn import warn

_Native = torch.classes.h2o_prefill.PrefillConfig
_DEFAULTS = _Native()
_Class = TypeVar("_Class")

# A `min_prefill` by the costs of the device, and how C++ has it.
AUTO, _NATIVE_AUTO = "auto", -1


# Settings are values: equal ones share what is made of them.
_cached = lru_cache(maxsize=256)


def _setting(text: str) -> Any:
    """Return a field with a help text; `_with_defaults` gives it the default of the C++ class."""
    return dataclasses.field(metadata={"help": text})


def _with_defaults(cls: type[_Class]) -> type[_Class]:
    for name in cls.__annotations__:
        default = getattr(_DEFAULTS, name)
        getattr(cls, name).default = tuple(default) if isinstance(default, list) else default
    return cls


@dataclass(frozen=True)
@_with_defaults
class PrefillConfig:
    """Settings of chunked sparse prefill. By default all options beyond the specification are off.

    Raises
    ------
    ValueError
        If a value is out of its range. The message names the argument, the rule and the value.

    Warns
    -----
    UserWarning
        If the memory set is empty, which makes every call dense, or not smaller than a chunk, so
        that sparse prefill saves less than it could.
    """

    chunk_size: int = _setting("Chunk size S in tokens; attention within a chunk is exact.")
    local_window: int = _setting(
        "Local window L: number of positions directly before a chunk that are always kept."
    )
    heavy_budget: int = _setting(
        "Heavy-hitter budget H: number of earlier positions kept because they received the most "
        "attention."
    )
    sink_tokens: int = _setting(
        "Attention sinks K: number of first positions of the prompt that are always kept."
    )
    dense_tail: int = _setting(
        "Number of queries at the end of a call that attend to all keys (exact attention)."
    )
    dense_layers: tuple[int, ...] = _setting("Layers whose attention is always dense.")
    gqa_reduce: str = _setting(
        'Reduction of scores over the query heads that share a KV head: "sum" or "max".'
    )
    min_prefill: int | str | None = _setting(
        "Minimum number of new tokens for a sparse call; shorter calls are dense. Default: "
        '`chunk_size`. "auto", as in the presets: prompts for which dense attention is faster on '
        "their device are dense."
    )
    recall: int = _setting(
        "Maximum number of matches that lexical recall, an n-gram lookup over the token ids, "
        "recalls for each token; 0 turns it off."
    )
    recall_characters: int = _setting(
        "Number of characters at the end of each token that lexical recall looks up as well, where "
        "it knows the text of the tokens: 32 keys after the latest match. 0 leaves it at tokens."
    )
    error_rows: int = _setting(
        "Number of rows of each chunk that also attend exactly, to measure the error of their "
        "sparse attention; 0 turns widening off."
    )
    error_threshold: float = _setting(
        "Mean squared error, relative to the exact output, above which L and H of a KV head double "
        "for the chunks that follow."
    )
    max_widen: int = _setting("Maximum factor by which errors multiply L and H during a prompt.")
    exact: bool = _setting(
        "Whether every call is dense, by this library's kernels, and nothing is lost."
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _typed(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        for sentence in self.native.advice():
            warn(sentence)

    @classmethod
    def parse(cls, text: str) -> PrefillConfig:
        """Parse a settings text.

        Parameters
        ----------
        text : str
            A preset and fields, separated by commas; layers are joined by "+". For example
            "recommended,local_window=256,dense_layers=7+17".

        Raises
        ------
        ValueError
            If the text has another form, a preset or field is unknown, or a value is out of range.
        """
        return cls.from_native(_Native.parse(text))

    @classmethod
    def from_native(cls, native: Any) -> PrefillConfig:
        """Return the settings of a `torch.classes.h2o_prefill.PrefillConfig`."""
        values = {field.name: getattr(native, field.name) for field in dataclasses.fields(cls)}
        if values["min_prefill"] == _NATIVE_AUTO:
            values["min_prefill"] = AUTO
        return cls(**values)

    @_cached
    def to_string(self) -> str:
        """Return the shortest text that `parse` turns into these settings."""
        return str(self.native.to_string())

    @property
    @_cached
    def native(self) -> Any:
        """The same settings as `torch.classes.h2o_prefill.PrefillConfig`."""
        return _Native(**{name: _as_native(value) for name, value in vars(self).items()})

    @property
    def is_auto(self) -> bool:
        """Whether `min_prefill` is open."""
        return self.min_prefill == AUTO

    def shortest_sparse_prompt(self, like: Tensor) -> int:
        """Return from how many tokens on sparse attention is faster on a tensor's device."""
        return self.shortest_at(sparse_cost(like.device, like.dtype))

    @_cached
    def shortest_at(self, sparse_product: float) -> int:
        """Return from how many tokens on sparse attention is faster, at a `sparse_cost`."""
        return int(self.native.shortest_sparse_prompt(sparse_product))

    def resolved(self, shortest: int, prompt_tokens: int) -> PrefillConfig:
        """Return the settings of a prompt, with an open `min_prefill` resolved.

        It is `chunk_size` for prompts of at least `shortest` tokens, and `shortest` for others.
        """
        if not self.is_auto:
            return self
        return self.with_min_prefill(self.native.resolved(shortest, prompt_tokens).min_prefill)

    def check_fits(self, layers: int) -> None:
        """Raise ValueError if `dense_layers` names layers that a model does not have."""
        if any(layer >= layers for layer in self.dense_layers):
            raise ValueError(f"layers of dense_layers must be < {layers}, got {self.dense_layers}")

    @_cached
    def with_min_prefill(self, tokens: int | str) -> PrefillConfig:
        """Return the settings of a prompt whose open `min_prefill` was resolved."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The open settings have warned already.
            return self.replace(min_prefill=tokens)

    @property
    def memory_size(self) -> int:
        """Maximum number of positions in a memory set: K + L + H, of the widest head."""
        return int(self.native.memory_size())

    @property
    def recall_block(self) -> int:
        """Number of queries that share a list of recalled keys."""
        return int(self.native.recall_block())

    @property
    def sparse_from(self) -> int:
        """Minimum number of new tokens for a sparse call."""
        return int(self.native.sparse_from())

    def is_long_call(self, past: int, new: int) -> bool:
        """Return whether a call of `new` tokens after `past` is long enough and not decoding."""
        return bool(self.native.is_long_call(past, new))

    def is_sparse_call(self, past: int, new: int) -> bool:
        """Return whether a call of `new` tokens after `past` is sparse outside `dense_layers`."""
        return bool(self.native.is_sparse_call(past, new))

    def is_sparse(self, layer: int, past: int, new: int) -> bool:
        """Return whether a layer is sparse in a call of `new` tokens after `past`."""
        return bool(self.native.is_sparse(layer, past, new))

    def last_chunk_begin(self, past: int, new: int) -> int:
        """Return where the last chunk of a call of `new` tokens after `past` begins."""
        return int(self.native.last_chunk_begin(past, new))

    def of_layer(self, layer: int | None) -> PrefillConfig:
        """Return the settings of one layer; None: a layer without an index."""
        if layer is None or not self.error_rows:
            return self
        return _of_layer(self, layer)

    def replace(self, **changes: object) -> PrefillConfig:
        """Return a copy with exactly these fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_fields(self, **changes: Any) -> PrefillConfig:
        """Return a copy with some fields changed, as a settings text changes its preset.

        Raises ValueError if a field is unknown, or a value has the wrong type or is out of range.
        """
        # C++ has the message for an unknown name.
        known = {field.name for field in dataclasses.fields(self)}
        typed = {name: _typed(name, x) if name in known else x for name, x in changes.items()}
        text = ",".join(f"{name}={format_value(value)}" for name, value in typed.items())
        return self if not text else PrefillConfig.from_native(self.native.with_fields(text))


def crossover_text(like: Tensor, shortest: int) -> str:
    """Return why prompts of fewer than `shortest` tokens are dense on the device of a tensor."""
    device, _, measured = torch.ops.h2o_prefill.device_cost(like.device, like.dtype)
    where = f"{device}, {str(like.dtype).removeprefix('torch.')}"
    how = "which is faster on" if measured else "which is assumed to be faster on the unmeasured"
    return f"prompts of fewer than {shortest:,} tokens are dense, {how} {where}"


def _with_parameters(docstring: str) -> str:
    types = {
        "int | str | None": 'int or "auto", optional',
        "tuple[int, ...]": "tuple of int",
    }
    section = "Parameters\n----------\n"
    for field in dataclasses.fields(PrefillConfig):
        text = textwrap.fill(field.metadata["help"], 92)
        section += f"{field.name} : {types.get(str(field.type), field.type)}\n"
        section += textwrap.indent(text, "    ") + "\n"
    head, raises, tail = docstring.partition("    Raises\n")
    return head + textwrap.indent(section, "    ") + "\n" + raises + tail


# Under python -OO there is no docstring.
if PrefillConfig.__doc__:
    PrefillConfig.__doc__ = _with_parameters(PrefillConfig.__doc__)


def format_value(value: Any) -> str:
    """Return a field's value as it is written in a settings text."""
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(name: str, value: Any) -> Any:
    """Return a value in the type of its field; C++ checks ranges."""
    default = getattr(_DEFAULTS, name)
    if isinstance(default, (bool, str)):
        if not isinstance(value, type(default)):
            raise ValueError(f"{name} must be a {type(default).__name__}, got {value!r}")
        return value
    if isinstance(default, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or abs(value) > sys.float_info.max:
            raise ValueError(f"{name} must be a number, got {value!r}")
        return float(value)
    if isinstance(default, list):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError(f"{name} must be a sequence of ints, got {value!r}")
        return tuple(_as_int(name, layer) for layer in value)
    if name == "min_prefill" and (value is None or value == AUTO):
        return value
    whole = _as_int(name, value)
    if name == "min_prefill" and whole == _NATIVE_AUTO:
        raise ValueError(f"{name} must be >= 1, {AUTO!r} or None, got {value!r}")
    return whole


def _as_int(name: str, value: Any) -> int:
    try:
        number = operator.index(value)  # accepts NumPy integers
        if isinstance(value, bool) or abs(number) >> 63:  # C++ has int64
            raise TypeError
        return number
    except TypeError:
        raise ValueError(f"{name} must be an int, got {value!r}") from None


def _as_native(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return _NATIVE_AUTO if value == AUTO else value


@_cached
def sparse_cost(device: torch.device, dtype: torch.dtype) -> float:
    """Return the time of a sparse query-key product, in products of a device's fastest dense."""
    return float(torch.ops.h2o_prefill.device_cost(device, dtype)[1])


@_cached
def _of_layer(config: PrefillConfig, layer: int) -> PrefillConfig:
    with warnings.catch_warnings():
        # The settings of the whole model have warned already.
        warnings.simplefilter("ignore")
        return PrefillConfig.from_native(config.native.of_layer(layer))
