"""`h2o-prefill bench`: prefill time, dense against sparse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, say_written, show_progress
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import check_output_folder, json_output
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.cli.tables import throughput_table


@options.add_size_options
def bench(
    model: options.ModelOption = "smollm2-135m",
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="N,N,...", help="Prompt lengths in tokens.")
    ] = "1024,2048,4096",
    runs: Annotated[
        int, options.count("--runs", "Timed runs per length; the table shows medians.")
    ] = 3,
    preset: options.PresetOption = None,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    output: Annotated[
        Path | None,
        options.output_folder(
            "Also measure memory, and draw throughput_comparison.png and memory_profile.png into "
            "this folder, which is created if necessary."
        ),
    ] = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Measure the time of dense and of sparse prefill, alternately, on random prompts."""
    from h2o_prefill.eval import benchmark_throughput, profile_memory
    from h2o_prefill.eval.plots import plot_memory_profile, plot_throughput
    from h2o_prefill.eval.report import build_report
    from h2o_prefill.profile import settings_name

    with quiet_libraries(), json_output(json_file) as save_json:
        figures = {
            "throughput_comparison.png": plot_throughput,
            "memory_profile.png": plot_memory_profile,
        }
        options.check_preset(preset, **sizes)
        check_output_folder(output, figures)
        chosen = options.parse_numbers(lengths, "lengths", least=1)
        network, _ = load_network(model, dtype, threads, device)
        config = options.find_settings(network, preset, **sizes)
        with show_progress("prefill") as show:
            frame = benchmark_throughput(network, chosen, runs, config, on_progress=show)
            memory = None
            if output is not None:
                memory = profile_memory(network, chosen, config, on_progress=show)
        what, described = f"{model} {dtype}, prefill", options.describe(network, config)
        origin = {"model": model, "dtype": dtype, "preset": settings_name(network, config)}
        tables = {"results": frame.to_dict(orient="records")}
        if memory is not None:
            tables["memory"] = memory.to_dict(orient="records")
        save_json(lambda: build_report({**origin, **dataclasses.asdict(config)}, **tables))
        if output is not None and memory is not None:
            folder = output.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            for (name, draw), values in zip(figures.items(), (frame, memory), strict=True):
                draw(values, folder / name, f"{what}, {described}")
                say_written(folder / name)
        print_result(f"{what}, median of {runs}\n{described}", throughput_table(frame))
