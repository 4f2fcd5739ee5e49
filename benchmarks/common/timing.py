"""Times callables against each other, interleaved: a machine that drifts slows all of them alike.

Every benchmark uses this and nothing else to take a time.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# A callable shorter than this is repeated within one measurement, so that the clock's own cost and
# resolution do not count.
SHORTEST = 2e-3
MAX_ROUNDS = 200

Clock = Callable[[], float]
# Takes a callable and how often to call it; returns the seconds of one call.
Timer = Callable[[Callable[[], object], int], float]


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    q1: float
    q3: float


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, and the quartiles of the ratios within single rounds."""

    value: float
    q1: float
    q3: float


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles (linear interpolation, end points included)."""
    if not values:
        raise ValueError("values must not be empty")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
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

        The two calls of a round lie next to each other in time, so the spread of their ratios says
        how sure the figure is, whatever else the machine did meanwhile.
        """
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        by_round = spread([above / below for above, below in pairs])
        return Ratio(self.median(numerator) / self.median(denominator), by_round.q1, by_round.q3)


def compare(
    candidates: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
) -> Timings:
    """Time callables in turns.

    Rounds go forwards and backwards through the candidates (A B, B A, A B, ...), so that none is
    always the first. Each is called before the first round, to warm up.
    """
    if not candidates:
        raise ValueError("candidates must not be empty")
    end = clock() + seconds
    timer = timer or functools.partial(_time, clock)
    repeats = {name: _repeats(call, timer) for name, call in candidates.items()}
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    forwards = list(candidates)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        rounds = 0
        while True:
            begin = clock()
            for name in [*forwards, *reversed(forwards)]:
                taken[name].append(timer(candidates[name], repeats[name]))
            rounds += 2
            now = clock()
            if rounds >= MAX_ROUNDS or now + (now - begin) > end:
                return Timings(taken)
    finally:
        if collecting:
            gc.enable()


def fits(call_seconds: float, seconds: float) -> bool:
    """Say whether the warm-up and two rounds of calls that take so long together fit a budget."""
    return 3 * call_seconds <= seconds


def gpu_timer(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call between CUDA events of the current stream.

    The host hands in all calls before it waits, as a model does, so what it spends on a call counts
    where it is more than what the GPU does.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _repeats(call: Callable[[], object], timer: Timer) -> int:
    """Warm up, and find how many calls make a measurement long enough."""
    repeats = 1
    while (taken := timer(call, repeats) * repeats) < SHORTEST:
        repeats *= 2 if taken <= 0 else max(2, min(10, int(SHORTEST / taken) + 1))
    return repeats


def _time(clock: Clock, call: Callable[[], object], repeats: int) -> float:
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats
