"""The settings of one sparse prefill."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass

GQA_REDUCTIONS = ("sum", "max")


@dataclass(frozen=True)
class PrefillConfig:
    """Settings of chunked sparse prefill. The defaults are the algorithm as specified, with no
    option on.

    Parameters
    ----------
    chunk_size : int
        S, tokens of a chunk; inside a chunk attention is exact and causal.
    local_window : int
        L, the last positions before a chunk that its memory set always holds.
    heavy_budget : int
        H, the positions that a memory set holds because earlier queries attended to them most.
    sink_tokens : int
        K, the first positions of the prompt, always held beside L and H.
    dense_tail : int
        The last queries of a call that attend to every key, exactly.
    dense_layers : tuple of int
        Layers that stay dense.
    wide_layers : tuple of int
        Layers whose memory sets have `wide_factor` times L and H.
    wide_factor : int
        See there.
    gqa_reduce : {"sum", "max"}
        How the column sums of the query heads that share a KV head become one score.
    min_prefill : int, optional
        Calls with fewer new tokens are dense over the whole cache. Default: one chunk.
    recall : int
        Earlier places recalled for a token by lexical recall; 0 turns it off.
    recall_block : int
        Rows that share one list of recalled keys; `chunk_size` is a multiple of it.
    recall_suffix : int
        The longest suffix, in tokens, that lexical recall looks up.
    recall_span : int
        Keys recalled from a place on: 2 means the place and the one after.
    recall_max_count : int
        A single token is looked up only if it stood at most this often so far.

    Raises
    ------
    ValueError
        If a value is out of its range. The message names the argument, the rule and the value.

    Warns
    -----
    UserWarning
        If the memory set is not smaller than a chunk: legal, but beyond the regime where the method
        pays.
    """

    chunk_size: int = 1024
    local_window: int = 256
    heavy_budget: int = 256
    sink_tokens: int = 0
    dense_tail: int = 0
    dense_layers: tuple[int, ...] = ()
    wide_layers: tuple[int, ...] = ()
    wide_factor: int = 4
    gqa_reduce: str = "sum"
    min_prefill: int | None = None
    recall: int = 0
    recall_block: int = 128
    recall_suffix: int = 3
    recall_span: int = 2
    recall_max_count: int = 16

    def __post_init__(self) -> None:
        for name in LAYER_FIELDS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, least in _LEAST.items():
            _check_at_least(name, getattr(self, name), least)
        if self.min_prefill is not None:
            _check_at_least("min_prefill", self.min_prefill, 1)
        for name in LAYER_FIELDS:
            for layer in getattr(self, name):
                _check_at_least(name, layer, 0)
        if self.gqa_reduce not in GQA_REDUCTIONS:
            raise ValueError(f"gqa_reduce must be one of {GQA_REDUCTIONS}, got {self.gqa_reduce!r}")
        if self.recall and self.chunk_size % self.recall_block:
            raise ValueError(
                "chunk_size must be a multiple of recall_block, got "
                f"{self.chunk_size} and {self.recall_block}"
            )
        if self.memory_size >= self.chunk_size:
            warnings.warn(
                f"the memory set ({self.memory_size} positions) is not smaller than chunk_size "
                f"({self.chunk_size}): sparse prefill saves less than it could",
                stacklevel=3,
            )

    @property
    def memory_size(self) -> int:
        """Positions that a memory set holds at most: K + L + H."""
        return self.sink_tokens + self.local_window + self.heavy_budget

    @property
    def sparse_from(self) -> int:
        """New tokens from which on a call is sparse."""
        return self.chunk_size if self.min_prefill is None else self.min_prefill

    def next_chunk_begin(self, past: int, new: int) -> int:
        """Return where the last chunk of a call begins.

        Parameters
        ----------
        past, new : int
            Tokens before the call, and tokens of the call (at least 1).
        """
        return past + (new - 1) // self.chunk_size * self.chunk_size

    def of_layer(self, layer: int | None) -> PrefillConfig:
        """Return the settings of one layer, all in one place: L and H as they are there.

        Parameters
        ----------
        layer : int or None
            None is a layer without a number, which is not wide.
        """
        if layer not in self.wide_layers:
            return self
        # Not through the constructor, which would warn once more of what was asked for.
        config = copy.copy(self)
        for name in ("local_window", "heavy_budget"):
            object.__setattr__(config, name, self.wide_factor * getattr(self, name))
        object.__setattr__(config, "wide_layers", ())
        return config

    def replace(self, **changes: object) -> PrefillConfig:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


# Fields that number layers.
LAYER_FIELDS = ("dense_layers", "wide_layers")

# The smallest legal value of every plain integer field.
_LEAST = {
    "chunk_size": 1,
    "local_window": 0,
    "heavy_budget": 0,
    "sink_tokens": 0,
    "dense_tail": 0,
    "wide_factor": 1,
    "recall": 0,
    "recall_block": 1,
    "recall_suffix": 1,
    "recall_span": 1,
    "recall_max_count": 1,
}


def _check_at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
