"""Draws items of work as fuzz does, runs them in this process, and reads memory between them."""

import ctypes
import gc
import os
import random
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from random_calls.calls import check_call, draw_call
from random_calls.draw import Draw, draw_settings
from random_calls.judge import Judge
from random_calls.operators import TENSORS
from random_calls.programs import check_program, draw_context
from soak import models

from h2o_prefill import ops

LONGEST = 4096
MIB = 1 << 20
# The most that medians of the first and the last third of the readings may differ. The library
# keeps the temporaries of the largest call so far, and the heap what is less than a page. A page
# lost with every item takes far more in half an hour. Some constants are made once.
TOLERANCES = {"resident": 16 * MIB, "tensors": 16}
FEWEST_READINGS = 6


class Reading(NamedTuple):
    """Bytes that a process has in memory, and live tensors."""

    seconds: float
    resident: int
    tensors: int = 0


def resident_bytes() -> int:
    """Return the bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def read_memory(seconds: float) -> Reading:
    """Collect garbage, give free memory back to the system, and read."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    return Reading(seconds, resident_bytes(), tensors)


def complaints(readings: list[Reading]) -> list[str]:
    """Return what is not flat, a sentence each."""
    if len(readings) < FEWEST_READINGS:
        return [f"{len(readings)} readings of memory, too few to judge"]
    third, found = len(readings) // 3, []
    for quantity, limit in TOLERANCES.items():
        values = [getattr(reading, quantity) for reading in readings]
        growth = statistics.median(values[-third:]) - statistics.median(values[:third])
        if growth > limit:
            found.append(f"{quantity} grew by {growth:,.0f}, more than {limit:,}")
    return found


def run_call(draw: Draw, judge: Judge) -> None:
    """Make a valid or a broken call of an operator."""
    call = draw_call(draw, draw.choice(list(TENSORS)), ("valid", "broken"))
    check_call(call, judge, traces=False)


def run_prompts(draw: Draw, judge: Judge) -> None:
    """Run prompts through a context and the operators, in random steps."""
    check_program(draw_context(draw, LONGEST), judge)


# Name: (how often, what).
KINDS: dict[str, tuple[float, Callable[[Draw, Judge], None]]] = {
    "call": (6, run_call),
    "prompts": (12, run_prompts),
    "model": (12, models.run_disturbed),
}
# The first items have the largest sizes, this many of each kind.
LARGEST_ITEMS = 4
# Seeds of one run; the place of an item in the run is its seed modulo this.
MOST_ITEMS = 10_000_000
WARM_UP = 0.2
MOST_FAILURES = 20
# More than any cache of settings keeps.
CACHED_SETTINGS = 400


def kind_of(seed: int) -> tuple[str, bool]:
    """Return the kind of an item, and whether it is of the largest size."""
    kinds, place = list(KINDS), seed % MOST_ITEMS
    if place < LARGEST_ITEMS * len(kinds):
        return kinds[place % len(kinds)], True
    weights = [weight for weight, _ in KINDS.values()]
    return random.Random(f"{seed} kind").choices(kinds, weights)[0], False


@dataclass
class SoakRun:
    """Runs items for some time."""

    seed: int
    seconds: float
    clock: Callable[[], float] = time.monotonic
    judge: Judge = field(default_factory=Judge)
    readings: list[Reading] = field(default_factory=list)
    items: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, on_reading: Callable[[Reading], None] = lambda _: None) -> list[str]:
        """Run until the time is over; return items that failed, and memory that is not flat."""
        # Hundreds of thousands of objects that there are already, and take long to look at.
        gc.collect()
        gc.freeze()
        begin = self.clock()
        # Every third has some readings however short the run is.
        interval, next_reading = min(10.0, self.seconds / 40), WARM_UP * self.seconds
        for seed in range(self.seed * MOST_ITEMS, (self.seed + 1) * MOST_ITEMS):
            largest = self.run_item(seed)
            elapsed = self.clock() - begin
            if elapsed >= next_reading and not largest:
                self.readings.append(read_memory(elapsed))
                on_reading(self.readings[-1])
                next_reading = self.clock() - begin + interval
            if elapsed >= self.seconds or len(self.failures) >= MOST_FAILURES:
                break
        gc.unfreeze()
        return self.failures + complaints(self.readings)

    def run_item(self, seed: int) -> bool:
        """Run one item and keep what went wrong with it; return whether it is of the largest."""
        kind, largest = kind_of(seed)
        try:
            with _surroundings(seed):
                KINDS[kind][1](Draw(random.Random(f"{seed} work"), largest), self.judge)
        except Exception:
            # As text: a traceback would keep the tensors of its frames.
            self.failures.append(f"item {seed} ({kind}):\n{traceback.format_exc()}")
        self.items[kind] += 1
        return largest


def fill_caches() -> None:
    """Build the models, and read more settings than any cache of settings keeps."""
    for name in models.FAMILIES:
        for dtype in models.DTYPES:
            models.shared(name, dtype)
    draw, token = Draw(random.Random("settings")), torch.zeros(1, 1, 1, 8)
    for length in range(1, CACHED_SETTINGS):
        text = draw_settings(draw, length).replace(dense_layers=()).to_string()
        ops.chunked_sparse_attention(*[token] * 3, *[None] * 5, 0, text)


@contextmanager
def _surroundings(seed: int) -> Iterator[None]:
    """No gradients and no warnings; a number of threads; sometimes memory poisoned with NaN."""
    draw, threads = Draw(random.Random(f"{seed} surroundings")), torch.get_num_threads()
    torch.set_num_threads(2 if draw.chance(0.2) else 1)
    # oneDNN keeps a compiled product for every new shape of 16-bit tensors: hundreds of MB.
    onednn, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    torch.use_deterministic_algorithms(draw.chance(0.25), warn_only=True)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Settings are drawn that the library advises against, and models that stay dense.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.enabled = onednn
        torch.set_num_threads(threads)
