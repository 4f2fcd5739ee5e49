"""Counters of an engine's processes, which the process that serves /metrics reads."""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Tells the processes that an engine starts where to count.
_FOLDER = "H2O_PREFILL_COUNTERS"

_NAMES = {
    "sparse_tokens": "Prompt tokens that attended sparsely",
    "exact_tokens": "Tokens of prompts that attended densely by this library's kernels",
    "lost_tokens": "Tokens that attended densely since the state of their prefix was gone",
    "state_hits": "Cached prefixes whose state was found",
    "state_misses": "Cached prefixes whose state was gone",
    "estimated_kl": "Sum of the estimated KL(dense || sparse) of prompts, nats a token",
    "estimated_prompts": "Prompts whose KL was estimated",
    "checkpoint_bytes": "Bytes of the states that are kept for prefixes",
}
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


class Counters:
    """Numbers by name; with a folder, in a file of it, which other processes see change."""

    def __init__(self, folder: str | None = None) -> None:
        size = 8 * len(_NAMES)
        if folder is None:
            self._values = memoryview(bytearray(size)).cast("d")
        else:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.truncate(size)
                self._values = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    def __getitem__(self, name: str) -> float:
        return self._values[_NUMBERS[name]]

    def add(self, name: str, amount: float) -> None:
        self._values[_NUMBERS[name]] += amount

    def set(self, name: str, value: float) -> None:
        self._values[_NUMBERS[name]] = value


def shared_folder() -> str:
    """Return the folder of this engine's counters: the first process makes and removes it."""
    if not os.environ.get(_FOLDER):
        folder, maker = tempfile.mkdtemp(prefix="h2o_prefill-"), os.getpid()

        def remove() -> None:
            if os.getpid() == maker:  # Not in a forked process.
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)
        os.environ[_FOLDER] = folder
    return os.environ[_FOLDER]


def show() -> None:
    """Show the counters of this engine at /metrics, if this process serves it."""
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector(shared_folder()))


def read(folder: str) -> dict[str, float]:
    """Return the sums over all processes that count in a folder."""
    files = [memoryview(path.read_bytes()).cast("d") for path in sorted(Path(folder).iterdir())]
    return {name: sum(values[i] for values in files) for name, i in _NUMBERS.items()}


class _Collector:
    """Shows the counters of a folder to Prometheus' client library."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in read(self._folder).items():
            kind = GaugeMetricFamily if name == "checkpoint_bytes" else CounterMetricFamily
            yield kind(f"h2o_prefill_{name}", _NAMES[name], value=value)
