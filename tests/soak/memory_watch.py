"""Whether memory stays flat: what is resident, and the tensors that Python holds."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from pathlib import Path
from typing import NamedTuple

import torch

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


def resident_bytes(process: int | str = "self") -> int:
    """Return the bytes that a process has in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
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
