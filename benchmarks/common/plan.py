"""What a benchmark runs: the options that all share, checked, with their defaults filled in."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from common.shapes import SHAPES, Heads
from common.timing import Timer, fits, gpu_timer
from h2o_prefill.cli import options
from h2o_prefill.cli.outputs import check_output_file
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import DTYPES
from h2o_prefill.eval.environment import has_cuda
from h2o_prefill.presets import preset_config

DEVICES = ("cpu", "cuda")
RESULTS = Path(__file__).parents[1] / "results"
QUICK_SECONDS = 0.02


@dataclass(frozen=True)
class Case:
    """One combination of what the options list."""

    heads: Heads
    dtype: torch.dtype
    threads: int
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device != "cpu"

    @property
    def timer(self) -> Timer | None:
        """What takes the times, for `compare`."""
        return gpu_timer if self.on_gpu else None

    @property
    def fields(self) -> dict[str, Any]:
        """What a row says of its case."""
        where = {"device": self.device} if self.on_gpu else {"threads": self.threads}
        return {
            "model": self.heads.name,
            "head_dim": self.heads.head_dim,
            "dtype": dtype_name(self.dtype),
            **where,
        }

    def qkv(self, length: int, past: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Make random q, k, v of this case."""
        return self.heads.qkv(length, self.dtype, past, self.device)


@dataclass(frozen=True)
class Lengths:
    """What --lengths is by default: that of a full run, and that of a quick one."""

    full: tuple[int, ...]
    quick: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The shared options of one run, with defaults filled in."""

    name: str
    threads: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Heads, ...]
    seconds: float
    quick: bool
    json: Path | None
    device: str = "cpu"
    lengths: tuple[int, ...] = ()
    preset: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device != "cpu"

    def cases(self) -> Iterator[Case]:
        """Go through all combinations, with PyTorch set to the number of threads."""
        for heads in self.shapes:
            for dtype in self.dtypes:
                for threads in self.threads:
                    torch.set_num_threads(threads)
                    yield Case(heads, dtype, threads, self.device)

    def config(self, preset: str | None = None) -> PrefillConfig:
        """Return the settings of a preset, by default that of --preset; small ones if quick."""
        if self.quick:
            return PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
        return preset_config(preset or self.preset)

    def affords(self, length: int, last: tuple[int, float] | None) -> bool:
        """Say whether dense attention over so many tokens fits the time of a row.

        `last` is the previous length, and the seconds that one call of every candidate took there.
        """
        if last is None or self.quick:
            return True
        return fits(last[1] * (length / last[0]) ** 2, self.seconds)


def make_plan(
    name: str,
    json: Path | None = None,
    threads: str | None = None,
    dtype: str | None = None,
    shape: str | None = None,
    seconds: float = 1.0,
    quick: bool = False,
    device: str = "cpu",
    preset: str = "",
    lengths: str | None = None,
    default_lengths: Lengths | None = None,
) -> Plan:
    """Check the shared options."""
    _check_device(device)
    if json is None and not quick:
        RESULTS.mkdir(exist_ok=True)
        json = RESULTS / (f"{name}.json" if device == "cpu" else f"{name}_{device}.json")
    try:
        if json is not None:
            check_output_file(json, "--json", (".json",))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # The host only hands work to a GPU.
    default_counts = [1] if quick or device != "cpu" else default_threads()
    defaults = default_lengths or Lengths((), ())
    default_dtypes = list(DTYPES)[:2] if device == "cpu" else ["bfloat16"]
    return Plan(
        name=name,
        threads=parse_numbers("--threads", threads, default_counts),
        dtypes=tuple(DTYPES[n] for n in _chosen("--dtype", dtype, DTYPES, default_dtypes)),
        shapes=tuple(SHAPES[n] for n in _chosen("--shape", shape, SHAPES, list(SHAPES))),
        seconds=QUICK_SECONDS if quick else seconds,
        quick=quick,
        json=json,
        device=device,
        preset=preset,
        lengths=parse_numbers("--lengths", lengths, defaults.quick if quick else defaults.full),
    )


def default_threads() -> list[int]:
    """Return 1, 2 and the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return sorted({1, min(2, cores), cores})


def parse_numbers(option: str, text: str | None, default: Sequence[int]) -> tuple[int, ...]:
    """Return the positive whole numbers of a comma-separated list, the default in place of None."""
    if text is None:
        return tuple(default)
    try:
        return tuple(options.parse_numbers(text, option, least=1))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise typer.BadParameter(f"--device must be of {', '.join(DEVICES)}, got {device!r}")
    if device == "cuda" and not (torch.cuda.is_available() and has_cuda()):
        why = "PyTorch finds no GPU" if has_cuda() else "h2o_prefill was built without CUDA kernels"
        raise typer.BadParameter(f"--device cuda is not possible: {why}")


def _chosen(option: str, text: str | None, known: Collection[str], default: list[str]) -> list[str]:
    names = default if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {name!r}")
    return names
