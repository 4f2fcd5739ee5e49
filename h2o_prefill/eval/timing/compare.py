"""Time callables against each other, interleaved, so that a machine that drifts slows all alike.

Evaluations and benchmarks use this and nothing else to compare times.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A callable shorter than this is repeated within one measurement, so that the clock's own cost and
# resolution do not count.
SHORTEST = 2e-3
MAX_ROUNDS = 200

Clock = Callable[[], float]
# Takes a callable and how often to call it; returns the seconds of one call.
Timer = Callable[[Callable[[], Any], int], float]


@dataclass(frozen=True)
class Spread:
    """A median, the quartiles around it, and the lowest and highest value."""

    median: float
    q1: float
    q3: float
    least: float
    most: float


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, and the spread of the ratios within single rounds."""

    value: float
    by_round: Spread

    def fields(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Return the fields `name`, `name_q1` and `name_q3` of a row, multiplied by `scale`."""
        values = {"": self.value, "_q1": self.by_round.q1, "_q3": self.by_round.q3}
        return {name + suffix: scale * value for suffix, value in values.items()}


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles (linear interpolation, end points included)."""
    if not values:
        raise ValueError("values must not be empty")
    if len(values) == 1:
        return Spread(*5 * [values[0]])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3, min(values), max(values))


@dataclass(frozen=True)
class Timings:
    """Seconds of one call: a list for each name, one entry a round."""

    seconds: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        """Rounds that were run."""
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        """Return the median time of a call in seconds."""
        return spread(self.seconds[name]).median

    def ratio(self, numerator: str, denominator: str) -> Ratio:
        """Return how many times longer `numerator` takes than `denominator`.

        The two calls of a round are consecutive, so the spread of their ratios shows how reliable
        the figure is, whatever else the machine does.
        """
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        by_round = spread([above / below for above, below in pairs])
        return Ratio(self.median(numerator) / self.median(denominator), by_round)


def compare(
    candidates: Mapping[str, Callable[[], Any]],
    seconds: float = 0.0,
    *,
    rounds: int | None = None,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Timings:
    """Time callables in turns, for `rounds` rounds, or else at least two within `seconds`.

    Rounds go forwards and backwards through the candidates (A B, B A, A B, ...), so that none is
    always the first. Each is called before the first round, to warm up. `on_step` is told what
    comes next.
    """
    if not candidates:
        raise ValueError("candidates must not be empty")
    end = clock() + seconds
    timer = timer or functools.partial(_time, clock)
    repeats: dict[str, int] = {}
    for name, call in candidates.items():
        on_step(name)
        repeats[name] = _repeats(call, timer)
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        done, begin = 0, clock()
        while not _is_enough(done, rounds, begin, clock(), end):
            if done % 2 == 0:
                begin = clock()
            for name in order:
                on_step(name)
                taken[name].append(timer(candidates[name], repeats[name]))
            order.reverse()
            done += 1
        return Timings(taken)
    finally:
        if collecting:
            gc.enable()


def _is_enough(done: int, rounds: int | None, begin: float, now: float, end: float) -> bool:
    """Say whether enough rounds are done; the last two began at `begin`."""
    if rounds is not None:
        return done == rounds
    return done > 0 and done % 2 == 0 and (done >= MAX_ROUNDS or now + (now - begin) > end)


def self_timed(call: Callable[[], float], repeats: int) -> float:
    """Return the mean of the seconds that calls return, which prepare more than is timed."""
    return statistics.fmean(call() for _ in range(repeats))


def _repeats(call: Callable[[], Any], timer: Timer) -> int:
    """Warm up, and find how many calls make a measurement long enough."""
    repeats = 1
    while (taken := timer(call, repeats) * repeats) < SHORTEST:
        repeats *= 2 if taken <= 0 else max(2, min(10, int(SHORTEST / taken) + 1))
    return repeats


def _time(clock: Clock, call: Callable[[], Any], repeats: int) -> float:
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats
