"""Random choices of one item of work, all from its seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

import torch

from h2o_prefill import PRESETS, PrefillConfig

T = TypeVar("T")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_CHUNK = 1024
# More chunks than that cost time and test nothing new.
MOST_CHUNKS = 128


class Draw:
    """The source of every choice of an item."""

    def __init__(self, seed: int, purpose: str, largest: bool = False) -> None:
        self.largest = largest
        self._random = random.Random(f"{seed} {purpose}")

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self._random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return self._random.choice(options)

    def integer(self, least: int, most: int) -> int:
        """Return an integer in [least, most]."""
        return self._random.randint(least, most)

    def size(self, least: int, most: int) -> int:
        """Return an integer in [least, most], small ones as often as large ones."""
        if self.largest:
            return most
        return min(most, int(math.exp(self._random.uniform(math.log(least), math.log(most + 1)))))

    def uniform(self, least: float, most: float) -> float:
        """Return a float in [least, most]."""
        return self._random.uniform(least, most)

    def seed(self) -> int:
        """Return a seed for another generator."""
        return self._random.randrange(2**31)

    def generator(self) -> torch.Generator:
        """Return a generator of tensors."""
        return torch.Generator().manual_seed(self.seed())


def draw_settings(draw: Draw, length: int, layers: int, whole: bool) -> PrefillConfig:
    """Draw settings from everything that they can be."""
    if draw.chance(0.15):
        preset = PRESETS[draw.choice(sorted(PRESETS))]
        return preset.with_fields(heavy_budget=length) if whole else preset
    # A rounded up quotient, so that there are never more chunks than MOST_CHUNKS.
    least = -(-length // MOST_CHUNKS)
    chunk_size = draw.size(least, max(least, min(LARGEST_CHUNK, length + 1)))
    sinks, local, heavy = _draw_budgets(draw, length, whole)
    return PrefillConfig(
        chunk_size=chunk_size,
        sink_tokens=sinks,
        local_window=local,
        heavy_budget=heavy,
        dense_tail=draw.size(1, length) if draw.chance(0.25) else 0,
        dense_layers=_draw_layers(draw, layers),
        wide_layers=_draw_layers(draw, layers),
        wide_factor=draw.integer(1, 4),
        gqa_reduce=draw.choice(["sum", "max"]),
        min_prefill=draw.size(1, 2 * chunk_size) if draw.chance(0.5) else None,
        recall=draw.integer(1, 8) if draw.chance(0.4) else 0,
        recall_block=_draw_divisor(draw, chunk_size),
        recall_suffix=draw.integer(1, 4),
        recall_span=draw.integer(1, 5),
        recall_max_count=draw.integer(1, 64),
        block_diagonal=draw.chance(0.5),
    )


def draw_calls(draw: Draw, begin: int, end: int, multiple: int = 1) -> list[int]:
    """Draw where the calls of a prompt end."""
    places = range(begin + multiple, end, multiple)
    count = min(len(places), draw.integer(0, 4))
    return sorted({draw.choice(places) for _ in range(count)} | {end})


def _draw_budgets(draw: Draw, length: int, whole: bool) -> tuple[int, int, int]:
    if whole:
        sinks = draw.integer(0, 8) if draw.chance(0.5) else 0
        local = draw.integer(0, length)
        return sinks, local, max(0, length - sinks - local) + draw.integer(0, 8)
    if draw.chance(0.03):
        return 0, 0, 0
    most = max(1, length // 3)
    sinks = draw.integer(0, 8) if draw.chance(0.4) else 0
    local = 0 if draw.chance(0.1) else draw.size(1, most)
    heavy = 0 if draw.chance(0.1) else draw.size(1, most)
    return sinks, local, heavy


def _draw_layers(draw: Draw, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if draw.chance(0.15))


def _draw_divisor(draw: Draw, number: int) -> int:
    # Blocks of a few rows make as many lists; the largest item needs no more than the others.
    return draw.choice([x for x in range(1, number + 1) if number % x == 0 and number // x <= 64])
