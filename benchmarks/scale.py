"""Prefill by stages in several processes: real runs on this machine, and simulated ones on many.

`run` is for torchrun, and takes one process too:

    torchrun --standalone --nproc-per-node 2 benchmarks/scale.py run

`simulate` needs no other machine. It times the layers here, on one thread, and lets ranks
compute them in the order of the real schedule over a network of a latency and a bandwidth.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from common.benchmark import (
    ModelOption,
    Plan,
    TextFileOption,
    benchmark,
    load_with_text,
    new_app,
    read_corpus,
)
from common.compare import compare
from common.machine import keep_freed_memory
from common.report import Report
from torch import Tensor

from h2o_prefill import chunked_prefill, enable
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import load_model
from h2o_prefill.generation.text import encode
from h2o_prefill.presets import preset_config

app = new_app()

RANKS = (1, 2, 4, 16)
LENGTHS = ((131072, 1048576, 10485760), (1024,))
CHECKED = 8192  # tokens of real runs


@dataclass(frozen=True)
class Parts:
    """Seconds of a chunk in one layer, and the size of what processes send."""

    layers: int
    seconds: float
    contention: float  # factor of times where all cores are busy
    hidden_bytes: int  # hidden states of a chunk


@dataclass(frozen=True)
class Network:
    """Messages take `latency` seconds, and one second for `bandwidth` bytes."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Return the time of a message of so many bytes."""
        return self.latency + size / self.bandwidth


def layers_schedule(
    parts: Parts, net: Network, chunks: int, ranks: int, speeds: list[float]
) -> float:
    """Return the seconds of a prompt whose chunks pass through stages of layers."""
    cuts = [parts.layers * rank // ranks for rank in range(ranks + 1)]
    free, end = [0.0] * ranks, 0.0
    for _ in range(chunks):
        end = 0.0
        for rank in range(ranks):
            begin = max(free[rank], end)
            work = (cuts[rank + 1] - cuts[rank]) * parts.seconds * speeds[rank]
            free[rank] = begin + work
            end = free[rank] + net.seconds(parts.hidden_bytes)
    return end


@benchmark(app, "simulate", lengths=LENGTHS, preset="recommended", dtype="bfloat16", seconds=120.0)
def simulate(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    text_file: TextFileOption = None,
    latency: Annotated[float, typer.Option(help="Microseconds of a message.")] = 60.0,
    bandwidth: Annotated[float, typer.Option(help="GB/s of a process, each way.")] = 2.5,
    jitter: Annotated[float, typer.Option(help="Sigma of the processes' log-normal speed.")] = 0.1,
    slowest: Annotated[float, typer.Option(help="Factor of one process's times.")] = 1.0,
    check: Annotated[bool, typer.Option(help="Compare with real runs of 1, 2 and 4.")] = False,
) -> None:
    """Simulate the efficiency of ranks that have some layers.

    Efficiency is the speedup over one process, divided by the number of processes.
    """
    corpus, config = read_corpus(text_file), plan.config()
    net = Network(latency * 1e-6, bandwidth * 1e9)
    title = "one prompt over several processes, simulated from the time of a layer"
    options: dict[str, Any] = {"model": model, "preset": plan.preset, "text": corpus.source}
    options["freed_memory_kept"] = keep_freed_memory()
    numbers = {"latency_us": latency, "bandwidth_gb": bandwidth, "jitter": jitter}
    with Report(plan, title, **options, **numbers, slowest=slowest) as report:
        for dtype, network, _, tokens in load_with_text(plan, model, corpus, 1):
            torch.set_num_threads(1)
            parts = measure_parts(network, tokens, config, plan.seconds)
            for length, ranks in ((n, r) for n in plan.lengths for r in RANKS):
                chunks = length // config.chunk_size
                if ranks > parts.layers:
                    continue
                seconds = layers_schedule(
                    parts, net, chunks, ranks, _speeds(ranks, jitter, slowest)
                )
                efficiency = 100 * chunks * parts.layers * parts.seconds / ranks / seconds
                report.add(length=length, ranks=ranks, layers_efficiency_percent=efficiency)
            if check:
                for row in checked(plan, parts, config, model, text_file, str(dtype)):
                    report.add(**row)


def measure_parts(model: Any, tokens: Tensor, config: PrefillConfig, seconds: float) -> Parts:
    """Time the prefill of eight chunks, alone and on all cores."""
    from common.variants import prefill_variants

    ids = tokens[: 8 * config.chunk_size].unsqueeze(0)
    calls = {"whole": prefill_variants(model, ids, config)["sparse"]}
    whole = compare(calls, seconds).median("whole")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    busy = compare(calls, seconds / 4).median("whole")
    torch.set_num_threads(1)
    text = model.config.get_text_config(decoder=True)
    layers, pieces = text.num_hidden_layers, ids.shape[1] // config.chunk_size
    return Parts(
        layers=layers,
        seconds=whole / layers / pieces,
        contention=busy * cores / whole,
        hidden_bytes=config.chunk_size * text.hidden_size * model.dtype.itemsize,
    )


def checked(
    plan: Plan,
    parts: Parts,
    config: PrefillConfig,
    model: str,
    text_file: Path | None,
    dtype: str,
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of real runs beside simulated ones, on the cores that there are."""
    cores, net = len(os.sched_getaffinity(0)), Network(1e-4, 2e9)
    chunks = CHECKED // config.chunk_size
    for ranks in (1, 2, 4):
        seconds = layers_schedule(parts, net, chunks, ranks, [1.0] * ranks)
        if ranks > 1:
            # Ranks that share cores take their work in turns.
            seconds = max(seconds, chunks * parts.layers * parts.seconds / cores)
            seconds *= parts.contention
        words = ["run", "--model", model, "--preset", plan.preset]
        words += ["--dtype", dtype.removeprefix("torch.")]
        words += ["--text-file", str(text_file)] if text_file else []
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, "-m", *launcher, __file__, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = re.search(r"(\d+\.\d+) s", done.stdout)
        if found is None:
            raise ValueError(f"a real run failed: {done.stderr.strip()[-500:]}")
        real = float(found[1])
        case = {"length": CHECKED, "ranks": ranks}
        yield {**case, "real_s": real, "simulated_s": seconds, "ratio": seconds / real}


@app.command()
def run(
    model: ModelOption = "smollm2-135m",
    text_file: TextFileOption = None,
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = CHECKED,
    dtype: Annotated[str, typer.Option(help="As float32.")] = "bfloat16",
    preset: Annotated[str, typer.Option(help="Settings.")] = "recommended",
    rounds: Annotated[int, typer.Option(min=1, help="The fastest counts; one more warms up.")] = 3,
) -> None:
    """Prefill a prompt in the processes of torchrun, and print the seconds that it takes."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    keep_freed_memory()
    distributed: dict[str, Any] = {}
    if count > 1:
        from transformers.distributed import DistributedConfig

        dist.init_process_group("gloo")
        distributed = {"distributed_config": DistributedConfig(pp_size=count)}
    network, tokenizer = load_model(model, dtype, **distributed)
    ids = encode(tokenizer, read_corpus(text_file).text)[:tokens].unsqueeze(0)
    seconds = math.inf
    with enable(network, preset_config(preset), tokenizer=tokenizer):
        for number in range(rounds + 1):
            if count > 1:
                dist.barrier()
            begin = time.monotonic()
            chunked_prefill(network, ids)
            if number:
                seconds = min(seconds, time.monotonic() - begin)
    if count == 1 or dist.get_rank() == 0:
        typer.echo(f"{ids.shape[1]} tokens, {count} processes: {seconds:.2f} s")
    if count > 1:
        dist.destroy_process_group()


def _speeds(ranks: int, jitter: float, slowest: float) -> list[float]:
    """Return the factors of the processes' times, one of them the slowest."""
    draw = random.Random(0)
    speeds = [math.exp(draw.gauss(0.0, jitter) - jitter**2 / 2) for _ in range(ranks)]
    if ranks == 1:
        return [1.0]
    speeds[ranks // 2] *= slowest
    return speeds


if __name__ == "__main__":
    app()
