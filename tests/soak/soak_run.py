"""Draws items of work, runs them, and reads memory between them."""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from random_calls.calls import check_call, draw_call
from random_calls.draw import Draw, draw_settings
from random_calls.judge import Judge
from random_calls.operators import TENSORS
from random_calls.programs import check_program, draw_context
from soak import model_items, models
from soak.memory_watch import MemoryWatch, Reading, without_old_objects

from h2o_prefill import ops

Work = Callable[[Draw, Judge], None]

LONGEST = 4096


def run_call(draw: Draw, judge: Judge) -> None:
    """Make a valid or a broken call of an operator."""
    call = draw_call(draw, draw.choice(list(TENSORS)), ("valid", "broken"))
    check_call(call, judge, traces=False)


def run_prompts(draw: Draw, judge: Judge) -> None:
    """Run prompts through a context and the operators, in random steps."""
    check_program(draw_context(draw, LONGEST), judge)


# Name: (how often, what).
KINDS: dict[str, tuple[float, Work]] = {
    "call": (6, run_call),
    "prompts": (12, run_prompts),
    "model, calls": (3, model_items.run_calls),
    "model, generate": (2, model_items.run_generate),
    "model, disturbed": (9, model_items.run_disturbed),
}
# The first items have the largest sizes, this many of each kind.
LARGEST_ITEMS = 4
# Seeds of one run; the place of an item in the run is its seed modulo this.
MOST_ITEMS = 10_000_000
WARM_UP = 0.2
MOST_FAILURES = 20
# More than any cache of settings keeps.
CACHED_SETTINGS = 400

_TOKEN = torch.zeros(1, 1, 1, 8)


def kind_of(seed: int) -> tuple[str, bool]:
    """Return the kind of an item, and whether it is of the largest size."""
    kinds = list(KINDS)
    place = seed % MOST_ITEMS
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
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    # By kind of item.
    items: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, on_reading: Callable[[Reading], None] = lambda _: None) -> bool:
        """Run until the time is over; return whether all is well."""
        fill_caches()
        with without_old_objects():
            self._run_items(on_reading)
        return not self.problems()

    def _run_items(self, on_reading: Callable[[Reading], None]) -> None:
        begin = self.clock()
        # Every third has some readings however short the run is.
        interval = min(10.0, self.seconds / 40)
        next_reading = WARM_UP * self.seconds
        for seed in range(self.seed * MOST_ITEMS, (self.seed + 1) * MOST_ITEMS):
            largest = self.run_item(seed)
            elapsed = self.clock() - begin
            if elapsed >= next_reading and not largest:
                on_reading(self.memory.read(elapsed))
                next_reading = self.clock() - begin + interval
            if elapsed >= self.seconds or len(self.failures) >= MOST_FAILURES:
                break

    def run_item(self, seed: int) -> bool:
        """Run one item and keep what went wrong with it; return whether it is of the largest."""
        begin, (kind, largest) = self.clock(), kind_of(seed)
        try:
            with _surroundings(seed):
                KINDS[kind][1](Draw(random.Random(f"{seed} work"), largest), self.judge)
        except Exception:
            # As text: a traceback would keep the tensors of its frames.
            self.failures.append(f"item {seed} ({kind}):\n{traceback.format_exc()}")
        self.items[kind] += 1
        self.spent[kind] += self.clock() - begin
        return largest

    def problems(self) -> list[str]:
        """Return what is wrong: items that failed, and memory that is not flat."""
        return self.failures + self.memory.complaints()


def fill_caches() -> None:
    """Build the models, and read more settings than any cache of settings keeps."""
    for name in models.FAMILIES:
        for dtype in models.DTYPES:
            models.shared(name, dtype)
    draw = Draw(random.Random("settings"))
    with _surroundings(0):
        for length in range(1, CACHED_SETTINGS):
            config = draw_settings(draw, length, layers=2)
            config = config.replace(wide=((0, 2),))
            text = config.of_layer(0).to_string()
            ops.prefill_attention(*[_TOKEN] * 3, *[None] * 5, 0, 0, text)


@contextmanager
def _surroundings(seed: int) -> Iterator[None]:
    """No gradients and no warnings; a number of threads; sometimes memory poisoned with NaN."""
    draw = Draw(random.Random(f"{seed} surroundings"))
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
