"""The C++ parts of the benchmarks (cpp/), which are built on first use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import h2o_prefill

SOURCES = Path(__file__).parents[1] / "cpp"
# One folder for each installed PyTorch: the parts are linked to it.
_TORCH = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:8]
BUILD = SOURCES.parents[1] / "build" / "benchmarks" / _TORCH

# DType of csrc/kernels/params.h.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Of one call of a peak: starting the threads does not count, and calls can be interleaved.
_PEAK_SECONDS = 0.02


@functools.cache
def load(target: str) -> ctypes.CDLL:
    """Build and load one of the libraries of cpp/CMakeLists.txt."""
    packages = f"{torch.utils.cmake_prefix_path};{Path(h2o_prefill.__file__).parent}"
    _cmake("-S", SOURCES, "-B", BUILD, f"-DCMAKE_PREFIX_PATH={packages}")
    _cmake("--build", BUILD, "--target", target, "--parallel")
    return ctypes.CDLL(str(BUILD / f"lib{target}.so"))


def _cmake(*arguments: object) -> None:
    own = Path(sys.executable).parent / "cmake"
    command = [str(own) if own.exists() else "cmake", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"cannot build {SOURCES}:\n{end}")


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, colsum: bool, indices: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend with one chunk, causally to itself or to the listed keys (cpp/colsum.cpp)."""
    _check_layout(q, k, v)
    _, query_heads, rows, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    width = 0 if indices is None else indices.shape[2]
    out = torch.empty(1, rows, query_heads, dim, dtype=q.dtype).transpose(1, 2)
    lse = torch.empty(1, query_heads, rows)
    sums = torch.empty(1, kv_heads, width or keys) if colsum else None
    tensors = [None if x is None else x.data_ptr() for x in (q, k, v, out, lse, sums, indices)]
    load("h2o_colsum").h2o_attend_chunk(
        _DTYPES[q.dtype],
        *map(ctypes.c_void_p, tensors),
        *map(ctypes.c_int64, (width, query_heads, kv_heads, rows, keys, dim)),
    )
    return out, lse, sums


@dataclass(frozen=True)
class Pair:
    """A class of C++ and its baseline, and whether their last results were equal to the bit."""

    ours: Callable[[], None]
    baseline: Callable[[], None]
    same: Callable[[], bool]


def dense_call(q: Tensor, k: Tensor, v: Tensor) -> AbstractContextManager[Pair]:
    """Attend with the last tokens of a history through a PrefillContext, and by dense_attention."""
    _check_layout(q, k, v)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v)]
    sizes = map(ctypes.c_int64, (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]))
    names = ("h2o_attend", "h2o_dense", "h2o_same")
    return _pair("call", names, q.dtype == torch.bfloat16, *pointers, *sizes)


def score_update(kv_heads: int, positions: int, memory: int) -> AbstractContextManager[Pair]:
    """Add column sums to the scores of a memory set: MemorySetTracker, and scatter_add_."""
    names = ("h2o_accumulate", "h2o_scatter_add", "h2o_same_scores")
    return _pair("scores", names, *map(ctypes.c_int64, (kv_heads, positions, memory)))


@contextmanager
def _pair(what: str, names: Sequence[str], *arguments: Any) -> Iterator[Pair]:
    library = load("h2o_context")
    new, delete = (getattr(library, f"h2o_{verb}_{what}") for verb in ("new", "delete"))
    ours, baseline, same = (getattr(library, name) for name in names)
    new.restype, same.restype = ctypes.c_void_p, ctypes.c_bool
    held = ctypes.c_void_p(new(*arguments))
    try:
        yield Pair(lambda: ours(held), lambda: baseline(held), lambda: same(held))
    finally:
        delete(held)


def _check_layout(*tensors: Tensor) -> None:
    for x in tensors:
        if not x.transpose(1, 2).is_contiguous():
            raise ValueError(f"inputs must lie in memory as [T, H, D], got strides {x.stride()}")


@dataclass(frozen=True)
class Work:
    """A callable, and what it does: flops, or bytes read plus bytes written."""

    run: Callable[[], object]
    amount: float


def peak_kinds() -> dict[str, int]:
    """Return the kinds of arithmetic that this CPU has, widest first, by name."""
    library = load("h2o_cpu_peak")
    library.h2o_peak_name.restype = ctypes.c_char_p
    found: dict[str, int] = {}
    number = 0
    while (name := library.h2o_peak_name(number)) is not None:
        if library.h2o_peak_supported(number):
            found[name.decode()] = number
        number += 1
    return found


def peak(kind: str, threads: int) -> Work | None:
    """Return the widest arithmetic of a kind, "fma" or "bf16_dot"; None if this CPU has none."""
    number = next((n for name, n in peak_kinds().items() if name.startswith(kind)), None)
    if number is None:
        return None
    run = load("h2o_cpu_peak").h2o_peak_run
    run.restype = ctypes.c_double
    iterations = 1000
    while True:
        call = functools.partial(run, number, threads, ctypes.c_int64(iterations))
        begin = time.perf_counter()
        flops = call()
        if time.perf_counter() - begin > _PEAK_SECONDS / 2:
            return Work(call, flops)
        iterations *= 2


def memory_traffic(threads: int, size: int) -> dict[str, Work]:
    """Return reading and copying a buffer of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    library, length = load("h2o_cpu_peak"), ctypes.c_int64(size)

    def read() -> None:
        library.h2o_peak_read(ctypes.c_void_p(source.data_ptr()), length, threads)

    def copy() -> None:
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (target, source))
        library.h2o_peak_copy(*pointers, length, threads)

    return {"memory_read": Work(read, size), "memory_copy": Work(copy, 2 * size)}
