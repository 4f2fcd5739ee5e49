"""Memory of this process, and single kernels of a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

# Options of mallopt().
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 1 << 30
_MAX_PROFILED = 50


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, and return whether its C library can.

    glibc gives large blocks back to the system when they are freed. The call that gets them next
    pays for their first touch, some 4 % of a prefill of 8,000 tokens, and which call that is
    changes with the order of the candidates. PyTorch's tuning guide recommends others.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not sys.platform.startswith("linux") or mallopt is None:
        return False
    return all(mallopt(option, _LARGEST) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))


def first_call_peak_bytes(call: Callable[[], object]) -> int:
    """Return what a call allocates at most in a thread that has kept no workspace yet."""
    from h2o_prefill.eval.timing import peak_bytes  # loads transformers

    with ThreadPoolExecutor(max_workers=1) as fresh_thread:
        return fresh_thread.submit(peak_bytes, call).result()


def temporary_megabytes(call: Callable[[], Tensor | tuple[Tensor, ...]]) -> float:
    """Return the most that a call holds at a time beside its results.

    In a thread that has kept no workspace yet.
    """
    results: list[Tensor | tuple[Tensor, ...]] = []
    peak = first_call_peak_bytes(lambda: results.append(call()))
    tensors = [results[0]] if isinstance(results[0], Tensor) else results[0]
    return (peak - sum(x.nbytes for x in tensors)) / 1e6


def resident_bytes() -> int | None:
    """Return the memory of this process, None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo2(ctypes.Structure):
    # Of malloc.h in the GNU C library: 10 numbers.
    _fields_ = [("values", 10 * ctypes.c_size_t)]


def allocated_bytes() -> int | None:
    """Return what malloc has handed out and not got back, None without the GNU C library.

    Unlike resident memory it does not depend on what the system reclaims.
    """
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    values = mallinfo2().values
    # hblkhd, in mapped blocks, and uordblks, in all others.
    return values[4] + values[7]


@cache  # a second load would itself allocate
def _mallinfo2() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


def kernel_seconds(
    call: Callable[[], object], names: Sequence[str], seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of the GPU kernels whose names hold each of `names`, one a round."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for kernels in profiled_rounds(call, seconds):
        for name in names:
            events = [time for key, (time, _) in kernels.items() if name in key]
            if not any(events):
                raise RuntimeError(f"no kernel {name} was launched")
            taken[name].append(sum(events))
    return taken


def profiled_rounds(
    call: Callable[[], object], seconds: float
) -> Iterator[dict[str, tuple[float, int]]]:
    """Give, a round, the seconds of each GPU kernel of a call and how often it ran, by its name."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or (rounds < _MAX_PROFILED and time.perf_counter() < end):
        with profile(activities=[ProfilerActivity.CUDA]) as run:
            call()
            torch.cuda.synchronize()
        yield {
            event.key: (event.self_device_time_total / 1e6, event.count)
            for event in run.key_averages()
            if event.self_device_time_total
        }
        rounds += 1
