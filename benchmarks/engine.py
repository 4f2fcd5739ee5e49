"""vLLM with and without this library: prefill by settings, and clients of one document."""

from __future__ import annotations

import itertools
import os
import statistics
from pathlib import Path
from typing import Annotated

import typer
from common.benchmark import Plan, TextFileOption, benchmark, dtype_name, new_app, read_corpus
from common.report import Report, Row
from common.worker import Worker
from transformers import AutoTokenizer

from h2o_prefill.generation import load_model
from h2o_prefill.generation.text import encode

app = new_app()

# Of a request. "vllm" is the kernel of vLLM.
VARIANTS = {"vllm": "dense", "exact": "exact", "recommended": "recommended", "h2o": "h2o"}
CLIENTS = (1, 8)
QUESTION = 100  # tokens of a client's own


@benchmark(app, "engine", dtype="bfloat16", lengths=((4096, 8000), (2100,)), seconds=600.0)
def engine(
    plan: Plan,
    vllm: Annotated[
        Path, typer.Option(help="The Python of the environment that make test-vllm makes.")
    ] = Path("build/vllm/bin/python"),
    folder: Annotated[
        Path, typer.Option(help="Where the model is kept in the format of transformers.")
    ] = Path("build/peers/formats/huggingface"),
    model: str = "smollm2-135m",
    text_file: TextFileOption = None,
) -> None:
    """Time prompts in one engine whose requests have their settings, in turns.

    Seconds of the CPU of the engine's process tell more than its time on a machine that others use.
    Then one client and eight clients at once ask about one document: seconds to the first token of
    the median and of the last one, first while nothing is cached and then with other questions.
    """
    corpus = read_corpus(text_file)
    if not folder.exists():
        network, tokenizer = load_model(model, plan.dtypes[0])
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    tokens = encode(AutoTokenizer.from_pretrained(folder), corpus.text).tolist()
    threads, dtype = max(plan.threads), dtype_name(plan.dtypes[0])
    options = {"model": model, "text": corpus.source, "lengths": plan.lengths, "dtype": dtype}
    arguments = {"folder": str(folder.resolve()), "threads": threads, "dtype": dtype}
    # The worker finds the installed package, not these sources with a library for another PyTorch.
    os.environ |= {"H2O_PREFILL_SETTINGS": "exact", "PYTHONSAFEPATH": "1"}
    with Report(plan, f"prefill of {model} inside of vLLM", **options) as report:
        worker = Worker(vllm, "common.engine:Engine", arguments)
        try:
            for length in plan.lengths:
                _prefills(report, plan, worker, tokens[:length], threads)
            longest = max(plan.lengths)
            document, rest = tokens[: longest - QUESTION], tokens[longest:]
            for (name, settings), clients in itertools.product(VARIANTS.items(), CLIENTS):
                worker.forget()
                for number, question in enumerate(("first", "second")):
                    begins = range(number, number + 2 * clients, 2)
                    asked = [rest[i * QUESTION : (i + 1) * QUESTION] for i in begins]
                    prompts = [document + x for x in asked]
                    seconds, cpu = worker.first_tokens(prompts, settings)
                    report.add(
                        variant=name,
                        length=longest,
                        threads=threads,
                        question=question,
                        clients=clients,
                        median_seconds=statistics.median(seconds),
                        last_seconds=max(seconds),
                        cpu_seconds=cpu,
                    )
        finally:
            worker.close()


def _prefills(report: Report, plan: Plan, worker: Worker, prompt: list[int], threads: int) -> None:
    """Add the rows of one prompt: medians of rounds that go forwards and backwards."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    spent, order = 0.0, list(VARIANTS)
    while spent < plan.seconds / len(plan.lengths):
        for name in order:
            taken[name].append(worker.prefill(prompt, VARIANTS[name]))
            spent += taken[name][-1][0]
        order.reverse()
    rows: dict[str, Row] = {}
    for name, times in taken.items():
        seconds, cpu = (statistics.median(x) for x in zip(*times, strict=True))
        where = {"variant": name, "length": len(prompt), "threads": threads}
        rows[name] = where | {"seconds": seconds, "cpu_seconds": cpu, "rounds": len(times)}
    for row in rows.values():
        report.add(**row, speedup=rows["vllm"]["cpu_seconds"] / row["cpu_seconds"])


if __name__ == "__main__":
    app()
