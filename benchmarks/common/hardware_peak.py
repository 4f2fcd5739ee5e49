"""What this CPU can do at most, as callables to be timed beside the kernels."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.native import load

# Long enough that starting the threads does not count, short enough to be interleaved.
_CALL_SECONDS = 0.02


@dataclass(frozen=True)
class Work:
    """A callable, and what it does: flops, or bytes read plus bytes written."""

    run: Callable[[], object]
    amount: float


def kinds() -> list[str]:
    """Return the kinds of arithmetic that this CPU has, widest first."""
    return list(_numbers())


def fma(threads: int) -> Work:
    """Return float32 multiply-adds with the widest instructions of this CPU."""
    return arithmetic(next(name for name in kinds() if name.startswith("fma")), threads)


def bf16_dot(threads: int) -> Work | None:
    """Return bf16 dot products, None if this CPU has no instruction for them."""
    names = [name for name in kinds() if name.startswith("bf16_dot")]
    return arithmetic(names[0], threads) if names else None


def arithmetic(kind: str, threads: int) -> Work:
    """Return one of `kinds` on so many threads."""
    number, library = _numbers()[kind], _library()
    iterations = 1000
    while True:
        begin = time.perf_counter()
        flops = library.h2o_peak_run(number, threads, iterations)
        if time.perf_counter() - begin > _CALL_SECONDS / 2:
            call = functools.partial(library.h2o_peak_run, number, threads, iterations)
            return Work(call, flops)
        iterations *= 2


def memory(threads: int, size: int) -> dict[str, Work]:
    """Return reading and copying a buffer of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    library = _library()

    def read() -> None:
        library.h2o_peak_read(source.data_ptr(), size, threads)

    def copy() -> None:
        library.h2o_peak_copy(target.data_ptr(), source.data_ptr(), size, threads)

    return {"memory_read": Work(read, size), "memory_copy": Work(copy, 2 * size)}


def _library() -> ctypes.CDLL:
    library = load("h2o_cpu_peak")
    pointer, length = ctypes.c_void_p, ctypes.c_int64
    library.h2o_peak_name.restype = ctypes.c_char_p
    library.h2o_peak_run.restype = ctypes.c_double
    library.h2o_peak_run.argtypes = [ctypes.c_int, ctypes.c_int, length]
    library.h2o_peak_read.argtypes = [pointer, length, ctypes.c_int]
    library.h2o_peak_copy.argtypes = [pointer, pointer, length, ctypes.c_int]
    return library


def _numbers() -> dict[str, int]:
    library = _library()
    found: dict[str, int] = {}
    number = 0
    while (name := library.h2o_peak_name(number)) is not None:
        if library.h2o_peak_supported(number):
            found[name.decode()] = number
        number += 1
    return found
