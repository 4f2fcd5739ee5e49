"""`h2o-prefill bench`: prefill time and memory, dense against sparse."""

from __future__ import annotations

import dataclasses

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval import benchmark_throughput
from h2o_prefill.eval.report import build_report


@options.command
def bench(
    model: options.ModelOptions,
    *,
    preset: options.PresetOption = None,
    lengths: str = typer.Option(
        "1024,2048,4096", metavar="N,N,...", help="Prompt lengths in tokens."
    ),
    runs: int = typer.Option(3, min=1, help="Timed runs per length; the table shows medians."),
    report: outputs.ReportOptions,
) -> None:
    """Measure time and peak memory of dense and of sparse prefill, in turns, on random prompts."""
    report.check()
    config = options.find_settings(preset)
    prompts = options.parse_numbers(lengths, "lengths", least=1)
    network, _ = model.load()
    with console.show_progress("prefill") as show:
        frame = benchmark_throughput(network, prompts, runs, config, on_progress=show)
    name = config.to_string()
    origin = {"model": model.model, "dtype": model.dtype, "preset": name}
    origin |= dataclasses.asdict(config)
    report.write(lambda: build_report(origin, results=frame.to_dict(orient="records")))
    table = tables.throughput_table(frame)
    report.show(f"{model}, prefill, median of {runs}\n{name}", table)
