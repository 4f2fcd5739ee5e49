"""Draws items of work, runs them, and reads memory between them."""

from __future__ import annotations

import ctypes
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tiny_zoo
import torch
from context_items import run_context
from draws import Draw, draw_settings
from failure_items import run_failure
from in_place_items import run_in_place
from judge import Judge
from memory_watch import MemoryWatch, Reading, without_old_objects
from model_items import run_again, run_calls, run_generate, run_whole_memory
from op_items import run_operator
from real_model_items import is_installed, run_real_model

from h2o_prefill import ops

Work = Callable[[Draw, Judge], None]

PRETRAINED = "pretrained model"
# Name: (how often, what).
KINDS: dict[str, tuple[float, Work]] = {
    "operator": (6, run_operator),
    "operator in place": (6, run_in_place),
    "context": (6, run_context),
    "model, whole memory": (3, run_whole_memory),
    "model, calls": (3, run_calls),
    "model, again": (3, run_again),
    "model, generate": (2, run_generate),
    "model, failing": (4, run_failure),
    PRETRAINED: (0.02, run_real_model),
}
# The first items have the largest sizes, this many of each kind of tiny things.
LARGEST_ITEMS = 4
# Seeds of one run; the place of an item in the run is its seed modulo this.
MOST_ITEMS = 10_000_000
WARM_UP = 0.2
MOST_FAILURES = 20
LEAKED_BYTES = 256 << 10
# More than any cache of settings keeps.
CACHED_SETTINGS = 400

_TOKEN = torch.zeros(1, 1, 1, 8)


@dataclass(frozen=True)
class Item:
    """One item of work, which its seed determines."""

    seed: int
    kind: str
    largest: bool

    @classmethod
    def from_seed(cls, seed: int) -> Item:
        """Return the item of a seed."""
        tiny = [kind for kind in KINDS if kind != PRETRAINED]
        kinds = [*tiny, PRETRAINED] if is_installed() else tiny
        largest = kinds + (LARGEST_ITEMS - 1) * tiny
        place = seed % MOST_ITEMS
        if place < len(largest):
            return cls(seed, largest[place], largest=True)
        point = Draw(seed, "kind").uniform(0, sum(KINDS[kind][0] for kind in kinds))
        ends = itertools.accumulate(KINDS[kind][0] for kind in kinds)
        kind = next(kind for kind, end in zip(kinds, ends, strict=True) if point <= end)
        return cls(seed, kind, largest=False)


@dataclass
class Count:
    """Items of one kind, and the time that they took."""

    items: int = 0
    seconds: float = 0.0


@dataclass
class SoakRun:
    """Runs items for some time."""

    seed: int
    seconds: float
    leak: str | None = None
    clock: Callable[[], float] = time.monotonic
    judge: Judge = field(default_factory=Judge)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    counts: dict[str, Count] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)

    def run(self, on_reading: Callable[[Reading], None] = lambda _: None) -> bool:
        """Run until the time is over; return whether all is well."""
        _fill_caches()
        with without_old_objects():
            self._run_items(on_reading)
        return not self.problems()

    def _run_items(self, on_reading: Callable[[Reading], None]) -> None:
        begin = self.clock()
        # Every third has some readings however short the run is.
        interval = min(10.0, self.seconds / 40)
        next_reading = WARM_UP * self.seconds
        for seed in self._seeds():
            item = Item.from_seed(seed)
            self.run_item(item)
            elapsed = self.clock() - begin
            if elapsed >= next_reading and not item.largest:
                on_reading(self.memory.read(elapsed))
                next_reading = self.clock() - begin + interval
            if elapsed >= self.seconds or len(self.failures) >= MOST_FAILURES:
                break

    def run_item(self, item: Item) -> None:
        """Run one item and keep what went wrong with it."""
        begin = self.clock()
        try:
            with _surroundings(item.seed):
                KINDS[item.kind][1](Draw(item.seed, "work", item.largest), self.judge)
        except Exception:
            # As text: a traceback would keep the tensors of its frames.
            self.failures.append(f"item {item.seed} ({item.kind}):\n{traceback.format_exc()}")
        count = self.counts.setdefault(item.kind, Count())
        count.items += 1
        count.seconds += self.clock() - begin
        self._plant_leak()

    def problems(self) -> list[str]:
        """Return what is wrong: items that failed, and memory that is not flat."""
        return self.failures + self.memory.complaints()

    def _seeds(self) -> Iterator[int]:
        return iter(range(self.seed * MOST_ITEMS, (self.seed + 1) * MOST_ITEMS))

    def _plant_leak(self) -> None:
        if self.leak == "tensors":
            self._kept.append(torch.zeros(1))
        elif self.leak == "bytes":
            block = ctypes.create_string_buffer(LEAKED_BYTES)
            ctypes.memset(block, 1, LEAKED_BYTES)
            self._kept.append(block)


def _fill_caches() -> None:
    """Build the models, and read more settings than any cache of settings keeps."""
    tiny_zoo.build_all()
    draw = Draw(0, "settings")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in range(1, CACHED_SETTINGS):
            config = draw_settings(draw, length, layers=2, whole=False)
            config = config.replace(wide_layers=(0,), wide_factor=2)
            text = config.of_layer(0).to_string()
            ops.prefill_attention(*[_TOKEN] * 3, *[None] * 5, 0, 0, text)


@contextmanager
def _surroundings(seed: int) -> Iterator[None]:
    """No gradients and no warnings; a number of threads; sometimes memory poisoned with NaN."""
    draw = Draw(seed, "surroundings")
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if draw.chance(0.2) else 1)
    # oneDNN keeps a compiled product for every new shape of 16-bit tensors: hundreds of MB.
    onednn, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    if draw.chance(0.25):
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Settings are drawn that the library advises against, and models that stay dense.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.enabled = onednn
        torch.set_num_threads(threads)
