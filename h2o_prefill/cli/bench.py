"""`h2o-prefill bench`: prefill time, dense against sparse."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval import benchmark_throughput, profile_memory
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
    output: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Also measure memory, and draw throughput_comparison.png and memory_profile.png "
        "into this folder, which is created if necessary.",
    ),
) -> None:
    """Measure the time of dense and of sparse prefill, alternately, on random prompts."""
    from h2o_prefill.eval.plots import plot_memory_profile, plot_throughput

    figures = {
        "throughput_comparison.png": plot_throughput,
        "memory_profile.png": plot_memory_profile,
    }
    report.check()
    config = options.find_settings(preset)
    outputs.check_output_folder(output, figures)
    prompts = options.parse_numbers(lengths, "lengths", least=1)
    network, _ = model.load()
    with console.show_progress("prefill") as show:
        frames = [benchmark_throughput(network, prompts, runs, config, on_progress=show)]
        if output is not None:
            frames.append(profile_memory(network, prompts, config, on_progress=show))
    name = config.to_string()
    origin = {"model": model.model, "dtype": model.dtype, "preset": name}
    rows = (frame.to_dict(orient="records") for frame in frames)
    parts = dict(zip(("results", "memory"), rows, strict=False))
    report.write(lambda: build_report({**origin, **dataclasses.asdict(config)}, **parts))
    if output is not None:
        folder = output.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for (file, draw), frame in zip(figures.items(), frames, strict=True):
            draw(frame, folder / file, f"{model}, prefill, {name}")
            console.stderr.print(f"wrote {folder / file}")
    table = tables.throughput_table(frames[0])
    report.show(f"{model}, prefill, median of {runs}\n{name}", table)
