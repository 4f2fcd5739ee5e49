"""How much memory a process holds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.eval.speed.peak_memory import peak_bytes


def resident_bytes() -> int | None:
    """Return the memory of this process, None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def first_call_peak_bytes(call: Callable[[], object]) -> int:
    """Return what a call allocates at most in a thread that has kept no workspace yet."""
    with ThreadPoolExecutor(max_workers=1) as fresh_thread:
        return fresh_thread.submit(peak_bytes, call).result()


def temporary_megabytes(call: Callable[[], Tensor | tuple[Tensor, ...]], on_gpu: bool) -> float:
    """Return the most that a call holds at a time beside its results.

    On the CPU in a thread that has kept no workspace yet.
    """
    results: list[Tensor | tuple[Tensor, ...]] = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(call())
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = first_call_peak_bytes(lambda: results.append(call()))
    tensors = [results[0]] if isinstance(results[0], Tensor) else results[0]
    return (peak - sum(x.nbytes for x in tensors)) / 1e6


class _Mallinfo2(ctypes.Structure):
    # Of malloc.h in the GNU C library.
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int | None:
    """Return what malloc has handed out and not got back, None without the GNU C library.

    Unlike resident memory it does not depend on what the system reclaims.
    """
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    info = mallinfo2()
    return info.uordblks + info.hblkhd


@cache  # a second load would itself allocate
def _mallinfo2() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function
