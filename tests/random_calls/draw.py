"""Where the choices of a random call come from, and settings drawn from it."""

import random
import warnings
from collections.abc import Sequence
from typing import TypeVar

import torch

from h2o_prefill import PRESETS, PrefillConfig

T = TypeVar("T")

LARGEST_CHUNK = 1024
# Above what rounding to 16 bits makes of no error.
ERROR_THRESHOLDS = (0.03, 0.3, 3.0)
# More chunks than that cost time and test nothing new.
MOST_CHUNKS = 128


class Draw:
    """Choices of a `random.Random`: a seeded one, or hypothesis's, which shrinks what it chose."""

    def __init__(self, source: random.Random, largest: bool = False) -> None:
        # Whether sizes are as large as they can be.
        self.largest = largest
        self._random = source

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.integer(0, 99) >= 100 * (1 - probability)

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options; the first is the simplest."""
        return options[self.integer(0, len(options) - 1)]

    def integer(self, least: int, most: int) -> int:
        """Return an integer in [least, most]."""
        return self._random.randint(least, most)

    def size(self, least: int, most: int) -> int:
        """Return an integer in [least, most], small ones as often as large ones."""
        if self.largest:
            return most
        least <<= self.integer(0, (most // least).bit_length() - 1)
        return self.integer(least, min(most, 2 * least - 1))

    def uniform(self, least: float, most: float) -> float:
        """Return one of 101 floats in [least, most]."""
        return least + (most - least) * self.integer(0, 100) / 100

    def sample(self, count: int, most: int) -> list[int]:
        """Return different integers in [0, most)."""
        return self._random.sample(range(most), min(count, most))

    def seed(self) -> int:
        """Return a seed for another generator."""
        return self.integer(0, 9999)

    def ids(self, batch: int, length: int, ordinary: tuple[int, int] = (0, 3)) -> torch.Tensor:
        """Return random token ids, int64 [batch, length]."""
        generator = torch.Generator().manual_seed(self.seed())
        return torch.randint(*ordinary, (batch, length), generator=generator)


def draw_settings(draw: Draw, length: int, layers: int = 1, kv_heads: int = 1) -> PrefillConfig:
    """Draw settings from everything that they can be."""
    with warnings.catch_warnings():
        # Some are drawn that the library advises against.
        warnings.simplefilter("ignore")
        return _draw_settings(draw, length, layers, kv_heads)


def _draw_settings(draw: Draw, length: int, layers: int, kv_heads: int) -> PrefillConfig:
    length = max(1, length)
    if draw.chance(0.1):
        return PRESETS[draw.choice(sorted(PRESETS))]
    # A rounded up quotient, so that there are never more chunks than MOST_CHUNKS.
    least = -(-length // MOST_CHUNKS)
    chunk_size = draw.size(least, max(least, min(LARGEST_CHUNK, length + 1)))
    sinks, local, heavy = _draw_budgets(draw, length)
    dense = [x for x in range(layers) if draw.chance(0.15)]
    recall = draw.integer(1, 8) if draw.chance(0.4) else 0
    # Blocks of a few rows make as many lists; the largest item needs no more than the others.
    if recall and chunk_size > 64:
        chunk_size += -chunk_size % 16
    error_rows = draw.integer(1, 8) if draw.chance(0.3) else 0
    return PrefillConfig(
        chunk_size=chunk_size,
        sink_tokens=sinks,
        local_window=local,
        heavy_budget=heavy,
        dense_tail=draw.choice([draw.size(1, length), 2**31 - 1]) if draw.chance(0.25) else 0,
        dense_layers=tuple(dense),
        wide=_draw_wide(draw, layers, kv_heads),
        gqa_reduce=draw.choice(["sum", "max"]),
        min_prefill=draw.size(1, 2 * chunk_size) if draw.chance(0.5) else None,
        recall=recall,
        recall_characters=draw.integer(1, 6) if draw.chance(0.3) else 0,
        error_rows=error_rows,
        error_threshold=draw.choice(ERROR_THRESHOLDS),
        max_widen=draw.integer(1, 9),
    )


def draw_calls(draw: Draw, end: int) -> list[int]:
    """Draw where the calls of a prompt end."""
    places = range(1, end)
    count = min(len(places), draw.integer(0, 4))
    return sorted({draw.choice(places) for _ in range(count)} | {end})


def _draw_wide(draw: Draw, layers: int, kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """Draw factors of the budgets of some layers and heads."""
    wide = [(layer, draw.integer(1, 4)) for layer in range(layers) if draw.chance(0.15)]
    heads = draw.sample(draw.integer(1, 4), layers * kv_heads) if draw.chance(0.3) else ()
    return (*wide, *((i // kv_heads, i % kv_heads, draw.integer(1, 4)) for i in heads))


def _draw_budgets(draw: Draw, length: int) -> tuple[int, int, int]:
    """Draw sinks, local window and heavy hitters."""
    sinks = draw.integer(0, 8) if draw.chance(0.4) else 0
    if draw.chance(0.03):
        return 0, 0, 0
    local, heavy = (draw.size(1, max(1, length // 3)) if draw.chance(0.9) else 0 for _ in range(2))
    return sinks, local, heavy
