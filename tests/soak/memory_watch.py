"""Whether memory stays flat: what is resident, and what Python holds."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from h2o_prefill import PrefillConfig

MIB = 1 << 20
# The most that medians of the first and the last third of the readings may differ. The library
# keeps the temporaries of the largest call so far, and the heap what is less than a page. A page
# lost with every item takes far more in half an hour. Some constants are made once.
TOLERANCES = {"resident": 16 * MIB, "tensors": 16, "objects": 16}
FEWEST_READINGS = 6

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Reading:
    """Memory at one time."""

    seconds: float
    # Bytes of the process in memory, 0 where the system does not tell.
    resident: int
    # Live tensors, and live objects of classes of this library but settings; made since
    # `without_old_objects`.
    tensors: int
    objects: int


@dataclass
class MemoryWatch:
    """Readings after the warm-up, and the judgement over them."""

    readings: list[Reading] = field(default_factory=list)

    def read(self, seconds: float) -> Reading:
        """Collect garbage, give free memory back to the system, and read."""
        gc.collect()
        _trim_heap()
        kinds = Counter(map(type, gc.get_objects()))
        reading = Reading(
            seconds,
            _resident(),
            sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor)),
            sum(count for kind, count in kinds.items() if _is_ours(kind)),
        )
        self.readings.append(reading)
        return reading

    def complaints(self) -> list[str]:
        """Return what is not flat, a sentence each."""
        if len(self.readings) < FEWEST_READINGS:
            return [f"{len(self.readings)} readings of memory, too few to judge"]
        third, complaints = len(self.readings) // 3, []
        for quantity, limit in TOLERANCES.items():
            values = [getattr(reading, quantity) for reading in self.readings]
            growth = statistics.median(values[-third:]) - statistics.median(values[:third])
            if growth > limit:
                complaints.append(f"{quantity} grew by {growth:,.0f}, more than {limit:,}")
        return complaints


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Leave out the objects that there are: hundreds of thousands, which take long to look at."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_ours(kind: type) -> bool:
    # Settings are kept by caches of a bounded size.
    return str(kind.__module__).startswith("h2o_prefill") and kind is not PrefillConfig


def _resident() -> int:
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
