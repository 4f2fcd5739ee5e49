"""Counters of an engine's processes, which the process that serves /metrics reads."""

from __future__ import annotations

import atexit
import bisect
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Tells the processes that an engine starts where to count.
_FOLDER = "H2O_PREFILL_COUNTERS"

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
    """Numbers by name; with a folder, in a file of it, which other processes see change."""

    def __init__(self, folder: str | None = None) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, delete=folder is None) as file:
            self._values = np.memmap(file.name, "d", "w+", shape=len(_NUMBERS))

    def __getitem__(self, name: str) -> float:
        return float(self._values[_NUMBERS[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._values[_NUMBERS[name]] = value

    def add_prompt(self, kl: float) -> None:
        """Count a prompt with this estimated KL."""
        self[_KL] += kl
        self[_BUCKETS[bisect.bisect_left(_BOUNDS, kl)]] += 1


def shared_folder() -> str:
    """Return the folder of this engine's counters: the first process makes and removes it."""
    if not os.environ.get(_FOLDER):
        os.environ[_FOLDER] = folder = tempfile.mkdtemp(prefix="h2o_prefill-")
        # Processes that multiprocessing forks leave without it.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return os.environ[_FOLDER]


def show() -> None:
    """Show the counters of this engine at /metrics, if this process serves it."""
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector(shared_folder()))


def read(folder: str) -> dict[str, float]:
    """Return the sums over all processes that count in a folder."""
    files = map(np.fromfile, Path(folder).iterdir())
    return dict(zip(_NUMBERS, sum(files, np.zeros(len(_NUMBERS))).tolist(), strict=True))


class _Collector:
    """Shows the counters of a folder to Prometheus' client library."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        values = read(self._folder)
        for name, text in _NAMES.items():
            gauge = name == "checkpoint_bytes"
            kind = core.GaugeMetricFamily if gauge else core.CounterMetricFamily
            yield kind(f"h2o_prefill_{name}", text, value=values[name])
        text = "Estimated KL(dense || sparse) of prompts, nats a token"
        counts = itertools.accumulate(values[bucket] for bucket in _BUCKETS)
        told = {"buckets": [*zip(_BUCKETS, counts, strict=True)], "sum_value": values[_KL]}
        yield core.HistogramMetricFamily(f"h2o_prefill_{_KL}", text, **told)
