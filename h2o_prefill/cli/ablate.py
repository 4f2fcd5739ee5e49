"""`h2o-prefill ablate`: perplexity over a grid of settings, texts and contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.cluster import ClusterOptions, add_cluster_options
from h2o_prefill.cli.console import quiet_libraries, say_written, show_progress
from h2o_prefill.cli.errors import kept_on_interrupt
from h2o_prefill.cli.options import add_field_options, load_network, load_texts
from h2o_prefill.cli.outputs import check_output_folder
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.cli.tables import ablation_table

_GRID = "Grid: one or more values, separated by commas"


@add_field_options(str | None, panel=_GRID, metavar="V,V,...")
@add_cluster_options
def ablate(
    model: options.ModelOption = "smollm2-135m",
    dataset: Annotated[str | None, options.datasets("Evaluation texts", _GRID)] = None,
    text_file: Annotated[list[Path] | None, options.text_files("evaluate on", _GRID)] = None,
    context: Annotated[
        str,
        typer.Option(
            "--context", metavar="N,N,...", help="Window length in tokens.", rich_help_panel=_GRID
        ),
    ] = "4096",
    windows: options.WindowsOption = "0:6",
    protocol: options.ProtocolOption = "gptq",
    preset: Annotated[
        list[str] | None,
        options.preset_option("Settings of fields that no option of the grid names; repeatable"),
    ] = None,
    select: options.SelectOption = None,
    dtype: options.DtypeOption = "float32",
    output: Annotated[
        Path, options.output_folder("Folder for perplexity_ablation.csv, created if necessary.")
    ] = Path("benchmark_results"),
    plot: Annotated[
        bool,
        typer.Option(
            "--plot/--no-plot",
            help="Also draw perplexity against attention flops, into perplexity_ablation.png.",
        ),
    ] = True,
    figure_format: options.FormatOption = "png",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    *,
    cluster: ClusterOptions,
    **fields: str | None,
) -> None:
    """Measure perplexity over a grid of settings.

    Every combination of values is a cell of the grid, and a row of a CSV file. Finished cells are
    kept: the same command resumes an interrupted run, and a larger grid computes only its new
    cells. Lists of layers are joined by "+": --dense-layers none,0,0+1. On a Dask cluster every
    worker measures cells; the file is written here.
    """
    kept = f"finished cells are kept in {str(output)!r}, the same command goes on with the others"
    with kept_on_interrupt(kept), quiet_libraries():
        from h2o_prefill.eval.ablation import parse_values, run_ablation
        from h2o_prefill.eval.ablation_table import CSV_NAME
        from h2o_prefill.eval.plots import plot_ablation

        for text in preset or ():
            options.check_preset(text)
        axes = {name: parse_values(name, text) for name, text in fields.items() if text is not None}
        rule = options.parse_select(select)
        contexts = options.parse_numbers(context, "context")
        csv_file = output.expanduser() / CSV_NAME
        figure = csv_file.with_suffix(f".{figure_format}")
        names = (CSV_NAME, *([figure.name] if plot else []))
        check_output_folder(output, names)
        texts = load_texts(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads, device)
        base = [options.find_settings(network, text) for text in preset or (None,)]
        with (
            cluster.connect(model, dtype, threads, device) as workers,
            show_progress("ablation") as show,
        ):
            frame = run_ablation(
                network,
                axes,
                output,
                base=base,
                datasets=texts,
                contexts=contexts,
                windows=windows,
                protocol=protocol,
                tokenizer=tokenizer,
                model_name=model,
                select=rule,
                cluster=workers,
                on_progress=show,
            )
        title = f"{model} {dtype}, windows {windows}, {protocol}, {len(frame)} cells\n"
        title += "; ".join(options.describe(network, config) for config in base)
        title += f", select={select}" if select else ""
        say_written(csv_file)
        if plot:
            plot_ablation(frame, figure)
            say_written(figure)
        print_result(title, ablation_table(frame))
