"""`h2o-prefill ablate`: perplexity over a grid of settings, texts and contexts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2o_prefill import generation
from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.cli.cluster import ClusterOptions
from h2o_prefill.cli.errors import interrupt_text
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation import parse_values, run_ablation
from h2o_prefill.eval.ablation_table import CSV_NAME

_GRID = "Grid: one or more values, separated by commas"

if TYPE_CHECKING:
    GridOptions = Any
else:
    GridOptions = dataclasses.make_dataclass(
        "GridOptions",
        [
            (x.name, Annotated[str | None, options.field_option(x.name, _GRID)], None)
            for x in dataclasses.fields(PrefillConfig)
        ],
    )


@options.command
def ablate(
    model: options.ModelOptions,
    cluster: ClusterOptions,
    grid: GridOptions,
    dataset: str | None = typer.Option(
        None,
        metavar="NAME,NAME,...",
        help=f"Evaluation texts, of {', '.join(generation.DATASETS)}.",
        rich_help_panel=_GRID,
        show_default="wikitext2, if no --text-file is given",
    ),
    text_file: list[Path] | None = typer.Option(
        None,
        metavar="FILE",
        help="UTF-8 text file to evaluate on, in addition to the datasets; may be repeated.",
        rich_help_panel=_GRID,
    ),
    context: str = typer.Option(
        "4096", metavar="N,N,...", help="Window length in tokens.", rich_help_panel=_GRID
    ),
    windows: options.WindowsOption = "0:6",
    preset: Annotated[
        list[str] | None,
        options.preset_option("Settings of fields that no option of the grid names; repeatable"),
    ] = None,
    output: Path = typer.Option(
        Path("benchmark_results"),
        metavar="DIR",
        help="Folder for perplexity_ablation.csv, created if necessary.",
    ),
    plot: bool = typer.Option(
        True, help="Also draw perplexity against attention flops, into perplexity_ablation.png."
    ),
    figure_format: options.FormatOption = "png",
) -> None:
    """Measure perplexity over a grid of settings.

    Every combination of values is a cell of the grid, and a row of a CSV file. Finished cells are
    kept: the same command resumes an interrupted run, and a larger grid computes only its new
    cells. Lists of layers are joined by "+": --dense-layers none,0,0+1. On a Dask cluster every
    worker measures cells; the file is written here.
    """
    rest = "the same command continues with the others"
    with interrupt_text(f"finished cells are kept in {str(output)!r}, {rest}"):
        from h2o_prefill.eval.plots import plot_ablation

        base = [options.find_settings(text) for text in preset or (None,)]
        values = {name: text for name, text in vars(grid).items() if text is not None}
        axes = {name: parse_values(name, text) for name, text in values.items()}
        contexts = options.parse_numbers(context, "context")
        csv_file = output.expanduser() / CSV_NAME
        figure = csv_file.with_suffix(f".{figure_format}")
        outputs.check_output_folder(output, (CSV_NAME, *([figure.name] if plot else [])))
        names = ([] if text_file else ["wikitext2"]) if dataset is None else dataset.split(",")
        texts = [generation.load_text(name.strip()) for name in names]
        texts += [generation.load_text(text_file=file) for file in text_file or ()]
        network, tokenizer = model.load()
        with cluster.connect(model) as workers, console.show_progress("ablation") as show:
            frame = run_ablation(
                network,
                axes,
                output,
                base=base,
                datasets=texts,
                contexts=contexts,
                windows=windows,
                tokenizer=tokenizer,
                model_name=model.model,
                cluster=workers,
                on_progress=show,
            )
        varied = "".join(f", {name} of {text}" for name, text in values.items())
        title = f"{model}, windows {windows}, {len(frame)} cells\n"
        title += "; ".join(config.to_string() for config in base) + varied
        console.stderr.print(f"wrote {csv_file}")
        if plot:
            plot_ablation(frame, figure)
            console.stderr.print(f"wrote {figure}")
        tables.print_result(title, tables.ablation_table(frame))
