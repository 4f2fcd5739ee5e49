"""Time callables against each other, interleaved, so that a machine that drifts slows all alike."""

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
    """A median and the quartiles around it."""

    median: float
    q1: float
    q3: float


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
        return Spread(*3 * [values[0]])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3)


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
    seconds: float,
    *,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
) -> Timings:
    """Time callables in turns, for at least two rounds within `seconds`.

    Rounds go forwards and backwards through the candidates (A B, B A, A B, ...), so that none is
    always the first. Each is called before the first round, to warm up.
    """
    if not candidates:
        raise ValueError("candidates must not be empty")
    end = clock() + seconds
    timer = timer or functools.partial(_time, clock)
    repeats = {name: _repeats(call, timer) for name, call in candidates.items()}
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        done, begin = 0, clock()
        while not _is_enough(done, begin, clock(), end):
            if done % 2 == 0:
                begin = clock()
            for name in order:
                taken[name].append(timer(candidates[name], repeats[name]))
            order.reverse()
            done += 1
        return Timings(taken)
    finally:
        if collecting:
            gc.enable()


def _is_enough(done: int, begin: float, now: float, end: float) -> bool:
    """Say whether enough rounds are done; the last two began at `begin`."""
    return done > 0 and done % 2 == 0 and (done >= MAX_ROUNDS or now + (now - begin) > end)


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
