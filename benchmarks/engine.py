"""vLLM with and without this library, and other programs: prefill, clients of one document."""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from common.benchmark import Plan, TextFileOption, benchmark, dtype_name, new_app, read_corpus
from common.modes import Programs
from common.report import Report
from common.worker import Worker

from h2o_prefill.generation import load_model
from h2o_prefill.generation.models import packaged_gguf
from h2o_prefill.generation.text import encode

app = new_app()

# Of a request inside of vLLM. "vllm" is the kernel of vLLM.
VARIANTS = {"vllm": "dense", "exact": "exact", "recommended": "recommended", "h2o": "h2o"}
OPENVINO = ("dense", "xattention 0.95")
CLIENTS = (1, 8)
QUESTION = 100  # tokens of a client's own


class Call(NamedTuple):
    """What prefills a prompt: a process, and what its method takes besides."""

    worker: Worker
    arguments: tuple[str, ...] = ()


@benchmark(app, "engine", dtype="bfloat16", lengths=((4096, 8000), (2100,)), seconds=600.0)
def engine(
    plan: Plan,
    vllm: Annotated[
        Path,
        typer.Option(exists=True, help="The Python of the environment that make test-vllm makes."),
    ] = Path("build/vllm/bin/python"),
    folder: Annotated[
        Path, typer.Option(help="Where environments and formats of programs are kept.")
    ] = Path("build/peers"),
    openvino: Annotated[
        bool, typer.Option("--openvino/--no-openvino", help="Time OpenVINO GenAI as well.")
    ] = True,
    text_file: TextFileOption = None,
) -> None:
    """Time prompts in one engine whose requests have their settings, and in others, in turns.

    CPU seconds of a program's process tell more than its time on a machine that others use. Then
    one client and eight clients at once ask about one document, in the engine: seconds to the
    first token of the median and of the last one, first while nothing is cached and then with other
    questions.
    """
    corpus = read_corpus(text_file)
    threads, dtype, source = max(plan.threads), dtype_name(plan.dtypes[0]), str(packaged_gguf())
    network, tokenizer = load_model(source, plan.dtypes[0])
    tokens = encode(tokenizer, corpus.text).tolist()
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(folder.resolve(), source, dtype, threads, max(plan.lengths) + QUESTION)
    facts: dict[str, Any] = {"model": Path(source).name, "text": corpus.source, "dtype": dtype}
    title = "prefill inside of vLLM, and by other programs"
    with Report(plan, title, lengths=plan.lengths, **facts) as report, ExitStack() as ends:

        def started(worker: Worker) -> Worker:
            ends.callback(worker.close)
            return worker

        engine = started(programs.engine(network, tokenizer, vllm))
        inside = {name: Call(engine, (settings,)) for name, settings in VARIANTS.items()}
        modes = programs.transformers()
        if openvino:
            found = programs.openvino(network, tokenizer, (16,))
            modes |= {name: mode for name, mode in found if name.endswith(OPENVINO)}
        others = {name: Call(started(mode.start())) for name, mode in modes.items()}
        for length in plan.lengths:
            _prefills(report, plan, inside | others, tokens[:length], threads)
        _ask(report, inside, tokens, max(plan.lengths), threads)


def _prefills(
    report: Report, plan: Plan, calls: dict[str, Call], prompt: list[int], threads: int
) -> None:
    """Add the rows of one prompt: medians of rounds that go forwards and backwards."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    spent, order = 0.0, list(calls)
    while spent < plan.seconds / len(plan.lengths):
        for name in order:
            worker, arguments = calls[name]
            cpu, begin = worker.cpu_seconds(), time.perf_counter()
            worker.prefill(prompt, *arguments)
            seconds = time.perf_counter() - begin
            taken[name].append((seconds, worker.cpu_seconds() - cpu))
            spent += seconds
        order.reverse()
    medians = {
        name: [statistics.median(x) for x in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    for name, (seconds, cpu) in medians.items():
        report.add(
            variant=name,
            length=len(prompt),
            threads=threads,
            seconds=seconds,
            cpu_seconds=cpu,
            rounds=len(taken[name]),
            speedup=medians["vllm"][1] / cpu,
        )


def _ask(
    report: Report, calls: dict[str, Call], tokens: list[int], length: int, threads: int
) -> None:
    """Add the rows of clients that ask about one document."""
    document, rest = tokens[: length - QUESTION], tokens[length:]
    for (name, (worker, arguments)), clients in itertools.product(calls.items(), CLIENTS):
        worker.forget()
        for number, question in enumerate(("first", "second")):
            begins = range(number, number + 2 * clients, 2)
            asked = [rest[i * QUESTION : (i + 1) * QUESTION] for i in begins]
            cpu = worker.cpu_seconds()
            seconds = worker.first_tokens([document + x for x in asked], *arguments)
            report.add(
                variant=name,
                length=length,
                threads=threads,
                question=question,
                clients=clients,
                median_seconds=statistics.median(seconds),
                last_seconds=max(seconds),
                cpu_seconds=worker.cpu_seconds() - cpu,
            )


if __name__ == "__main__":
    app()
