"""Counters of an engine's processes, which the process that serves /metrics reads."""

from __future__ import annotations

import bisect
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

# Tells the processes that an engine starts where to count.
_PATH = "H2O_PREFILL_COUNTERS"
# By the names that vLLM gives them. All others count for themselves, whatever they inherit.
_STARTED_BY_VLLM = ("ApiServer", "EngineCore", "VllmWorker")

_NAMES = {
    "sparse_tokens": "Prompt tokens that attended sparsely",
    "exact_tokens": "Tokens of prompts that attended densely by this library's kernels",
    "lost_tokens": "Tokens that attended densely since the state of their prefix was gone",
    "state_hits": "Cached prefixes whose state was found",
    "state_misses": "Cached prefixes whose state was gone",
    "checkpoint_bytes": "Bytes of the states that are kept for prefixes",
}
# A histogram over prompts: its sum, the upper bounds of its buckets, and their names.
_KL, _BOUNDS = "estimated_kl", (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_BUCKETS = [*map(str, _BOUNDS), "+Inf"]
_NUMBERS = {name: number for number, name in enumerate([*_NAMES, _KL, *_BUCKETS])}


class Counters:
    """Numbers by name; with a path, in a file that other processes count in as well."""

    def __init__(self, path: str | None = None) -> None:
        self._values = np.zeros(len(_NUMBERS))
        if path is not None:
            with open(path, "ab", buffering=0) as file:
                file.write(self._values.tobytes())
                offset = file.tell() - self._values.nbytes
            self._values = np.memmap(path, "d", "r+", offset, self._values.shape)

    def __getitem__(self, name: str) -> float:
        return float(self._values[_NUMBERS[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._values[_NUMBERS[name]] = value

    def add_prompt(self, kl: float) -> None:
        """Count a prompt with this estimated KL."""
        self[_KL] += kl
        self[_BUCKETS[bisect.bisect_left(_BOUNDS, kl)]] += 1


def shared_path() -> str:
    """Return the path of this engine's counters: memory of the process that started it.

    It has no name in a folder, so nothing is left of it where processes are killed.
    """
    own, path = f"/proc/{os.getpid()}/fd/", os.environ.get(_PATH, "")
    is_there = os.path.islink(path) and os.readlink(path).startswith("/memfd:h2o_prefill")
    is_part = multiprocessing.current_process().name.startswith(_STARTED_BY_VLLM)
    if not (is_there and (is_part or path.startswith(own))):
        os.environ[_PATH] = path = f"{own}{os.memfd_create('h2o_prefill')}"
    return path


def show() -> None:
    """Show the counters of this engine at /metrics, if this process serves it."""
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector(shared_path()))


def read(path: str) -> dict[str, float]:
    """Return the sums over all processes that count in a file."""
    rows = np.fromfile(path).reshape(-1, len(_NUMBERS))
    return dict(zip(_NUMBERS, rows.sum(axis=0).tolist(), strict=True))


class _Collector:
    """Shows the counters of a file to Prometheus' client library."""

    def __init__(self, path: str) -> None:
        self._path = path

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        values = read(self._path)
        for name, text in _NAMES.items():
            gauge = name == "checkpoint_bytes"
            kind = core.GaugeMetricFamily if gauge else core.CounterMetricFamily
            yield kind(f"h2o_prefill_{name}", text, value=values[name])
        text = "Estimated KL(dense || sparse) of prompts, nats a token"
        counts = itertools.accumulate(values[bucket] for bucket in _BUCKETS)
        told = {"buckets": [*zip(_BUCKETS, counts, strict=True)], "sum_value": values[_KL]}
        yield core.HistogramMetricFamily(f"h2o_prefill_{_KL}", text, **told)
