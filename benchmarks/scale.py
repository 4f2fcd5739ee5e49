"""Prefill over several processes: real runs on this machine, and simulated ones on many.

`run` is for torchrun, and takes one process too:

    torchrun --standalone --nproc-per-node 2 benchmarks/scale.py run --split tokens

`simulate` needs no other machine. It times the parts of a layer here, on one thread, and lets ranks
do them in the order of the real schedules over a network of a latency and a bandwidth.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import tempfile
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
from h2o_prefill.distributed import ShardPlan
from h2o_prefill.eval.attention_flops import find_recalled
from h2o_prefill.generation import load_model
from h2o_prefill.generation.text import encode
from h2o_prefill.presets import preset_config
from h2o_prefill.vocabulary import text_for

app = new_app()

RANKS = (1, 2, 4, 16, 64, 256, 1024)
LENGTHS = ((131072, 1048576, 10485760), (1024,))
SPLITS = ("tokens", "layers")
CHECKED = 8192  # tokens of real runs


@dataclass(frozen=True)
class Parts:
    """Seconds of a chunk in one layer, and sizes of what processes send."""

    layers: int
    before: float  # norm and projections to queries, keys and values
    attention: float
    attention_in_ranges: float  # by the way that a process takes which has some of the tokens
    after: float
    contention: float  # factor of times where all cores are busy
    chunk: int  # tokens
    row_bytes: int  # key and value of a token
    memory_bytes: int  # memory sets
    hidden_bytes: int  # hidden states of a chunk

    @property
    def seconds(self) -> float:
        """Seconds of a chunk in one layer."""
        return self.before + self.attention + self.after


@dataclass(frozen=True)
class Network:
    """Messages take `latency` seconds, and one second for `bandwidth` bytes."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Return the time of a message of so many bytes."""
        return self.latency + size / self.bandwidth


def tokens_schedule(
    parts: Parts, net: Network, chunks: int, ranks: int, recalled: float, speeds: list[float]
) -> float:
    """Return the seconds of a prompt in ranges; `recalled`: rows a token that others have."""
    attention = parts.attention_in_ranges if ranks > 1 else parts.attention
    own = [chunks * (r + 1) // ranks - chunks * r // ranks for r in range(ranks)]
    done = [0.0] * ranks
    for _ in range(parts.layers):
        arrival = projected = 0.0
        for rank, count in enumerate(own):
            work = count * speeds[rank]
            keys = done[rank] + work * parts.before
            # Rows of all earlier ranks come once the last of these has them.
            rows = recalled * count * parts.chunk * parts.row_bytes if rank else 0
            ready = max(keys, arrival, projected + net.seconds(rows) if rows else 0.0)
            end = ready + work * attention
            done[rank] = end + work * parts.after
            arrival = end + net.seconds(parts.memory_bytes)
            projected = max(projected, keys)
    return max(done)


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
    """Simulate the efficiency of ranks that have some tokens, or some layers, of one prompt.

    Efficiency is the speedup over one process, divided by the number of processes. `recalled MB`
    and `ring MB` are what a process receives in a layer: recalled rows, beside what ring attention
    would move. The text's recalled rows are counted; longer prompts recall as many a token.
    """
    corpus, config = read_corpus(text_file), plan.config()
    net = Network(latency * 1e-6, bandwidth * 1e9)
    title = "one prompt over several processes, simulated from the times of a layer's parts"
    options: dict[str, Any] = {"model": model, "preset": plan.preset, "text": corpus.source}
    options["freed_memory_kept"] = keep_freed_memory()
    numbers = {"latency_us": latency, "bandwidth_gb": bandwidth, "jitter": jitter}
    with Report(plan, title, **options, **numbers, slowest=slowest) as report:
        for dtype, network, tokenizer, tokens in load_with_text(plan, model, corpus, 1):
            torch.set_num_threads(1)
            parts = measure_parts(network, tokens, config, plan.seconds)
            text = tokens[: 1024 if plan.quick else 131072].unsqueeze(0)
            token_text = text_for(tokenizer, config)
            lists = find_recalled(text, config, token_text)
            for length, ranks in ((n, r) for n in plan.lengths for r in RANKS):
                chunks = length // config.chunk_size
                if chunks < ranks:
                    continue
                recalled = recalled_rows(text.shape[1], ranks, config, lists)
                speeds = _speeds(ranks, jitter, slowest)
                alone = chunks * parts.layers * parts.seconds
                row: dict[str, Any] = {"length": length, "ranks": ranks}
                seconds = tokens_schedule(parts, net, chunks, ranks, recalled, speeds)
                row["tokens_efficiency_percent"] = 100 * alone / ranks / seconds
                if ranks <= parts.layers:
                    seconds = layers_schedule(parts, net, chunks, ranks, speeds)
                    row["layers_efficiency_percent"] = 100 * alone / ranks / seconds
                own = length / ranks
                row["recalled_mb"] = recalled * own * parts.row_bytes / 1e6
                row["ring_mb"] = (length - own) * parts.row_bytes / 1e6
                report.add(**row)
            if check:
                lists = find_recalled(text[:, :CHECKED], config, token_text)
                for row in checked(plan, parts, config, lists, model, text_file, str(dtype)):
                    report.add(**row)


def measure_parts(model: Any, tokens: Tensor, config: PrefillConfig, seconds: float) -> Parts:
    """Time the prefill of eight chunks, with attention and without, and as a range of its own."""
    from common.variants import prefill_variants, twin

    ids = tokens[: 8 * config.chunk_size].unsqueeze(0)
    variants, ranged = prefill_variants(model, ids, config), twin(model)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        enable(ranged, config, process_group=dist.group.WORLD)
        calls = {
            "whole": variants["sparse"],
            "rest": variants["no_attention"],
            "range": lambda: chunked_prefill(ranged, ids),
        }
        timings = compare(calls, seconds)
        torch.set_num_threads(cores)
        busy = compare({"whole": calls["whole"]}, seconds / 4).median("whole")
        torch.set_num_threads(1)
        dist.destroy_process_group()
    whole, rest, range_ = (timings.median(name) for name in calls)
    text = model.config.get_text_config(decoder=True)
    layers, pieces = text.num_hidden_layers, ids.shape[1] // config.chunk_size
    layer = model.model.layers[0]
    projections = [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]
    share = sum(x.weight.numel() for x in projections) / sum(x.numel() for x in layer.parameters())
    heads, size = text.num_key_value_heads, model.dtype.itemsize
    row = 2 * heads * projections[1].out_features // heads * size
    width = config.memory_size // (config.max_widen if config.error_rows else 1)
    return Parts(
        layers=layers,
        before=share * rest / layers / pieces,
        attention=(whole - rest) / layers / pieces,
        attention_in_ranges=(range_ - rest) / layers / pieces,
        after=(1 - share) * rest / layers / pieces,
        contention=busy * cores / whole,
        chunk=config.chunk_size,
        row_bytes=row,
        memory_bytes=width * (row + 8 * heads),
        hidden_bytes=config.chunk_size * text.hidden_size * size,
    )


def recalled_rows(length: int, ranks: int, config: PrefillConfig, lists: Any) -> float:
    """Return the rows that a process recalls from others, a token of its own; mean of all."""
    ranks = min(ranks, length // config.chunk_size)
    plan = ShardPlan.of(length, ranks, config, lists)
    return sum(x.numel() for x in plan.recalled) / length


def checked(
    plan: Plan,
    parts: Parts,
    config: PrefillConfig,
    lists: Any,
    model: str,
    text_file: Path | None,
    dtype: str,
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of real runs beside simulated ones, on the cores that there are."""
    cores, net = len(os.sched_getaffinity(0)), Network(1e-4, 2e9)
    chunks = CHECKED // config.chunk_size
    for split in SPLITS:
        for ranks in (1, 2, 4):
            if split == "tokens":
                recalled = recalled_rows(CHECKED, ranks, config, lists)
                seconds = tokens_schedule(parts, net, chunks, ranks, recalled, [1.0] * ranks)
                alone = parts.before + parts.attention_in_ranges + parts.after
            else:
                alone = parts.seconds
                seconds = layers_schedule(parts, net, chunks, ranks, [1.0] * ranks)
            if ranks > 1:
                # Ranks that share cores take their work in turns.
                seconds = max(seconds, chunks * parts.layers * alone / cores)
                seconds *= parts.contention
            words = ["run", "--split", split, "--model", model, "--preset", plan.preset]
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
            case = {"length": CHECKED, "ranks": ranks, "split": split}
            yield {**case, "real_s": real, "simulated_s": seconds, "ratio": seconds / real}


@app.command()
def run(
    model: ModelOption = "smollm2-135m",
    text_file: TextFileOption = None,
    split: Annotated[str, typer.Option(help=f"One of {', '.join(SPLITS)}.")] = "tokens",
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
        dist.init_process_group("gloo")
        if split == "layers":
            from transformers.distributed import DistributedConfig

            distributed = {"distributed_config": DistributedConfig(pp_size=count)}
    network, tokenizer = load_model(model, dtype, **distributed)
    ids = encode(tokenizer, read_corpus(text_file).text)[:tokens].unsqueeze(0)
    group = dist.group.WORLD if count > 1 and split == "tokens" else None
    seconds = math.inf
    with enable(network, preset_config(preset), tokenizer=tokenizer, process_group=group):
        for number in range(rounds + 1):
            if count > 1:
                dist.barrier()
            begin = time.monotonic()
            chunked_prefill(network, ids)
            if number:
                seconds = min(seconds, time.monotonic() - begin)
    if count == 1 or dist.get_rank() == 0:
        typer.echo(f"{ids.shape[1]} tokens, {count} processes by {split}: {seconds:.2f} s")
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
