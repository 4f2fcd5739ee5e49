"""`h2o-prefill ablate`: perplexity over a grid of settings, texts and contexts."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TimeRemainingColumn

from ..config import PrefillConfig
from ..eval import DATASETS, PROTOCOLS, load_text
from ..presets import DEFAULT_PRESET
from . import options
from .ablation_summary import ablation_table
from .console import (
    print_wide,
    progress_bar,
    quiet_libraries,
    say_written,
    show_progress,
)
from .variants import parse_variants

if TYPE_CHECKING:
    from ..eval import Corpus

_GRID = "Grid: values with commas between"


def _field_options() -> list[inspect.Parameter]:
    """Return an option for every field of `PrefillConfig`, with its docstring as help."""
    described = re.findall(
        r"^(\w+) : .*\n((?:    .*\n?)+)", inspect.getdoc(PrefillConfig) or "", re.MULTILINE
    )
    helps = {name: " ".join(text.split()) for name, text in described}
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    f"--{field.name.replace('_', '-')}",
                    metavar="V,V,...",
                    help=helps.get(field.name, ""),
                    rich_help_panel=_GRID,
                    show_default="preset",
                ),
            ],
        )
        for field in dataclasses.fields(PrefillConfig)
    ]


def _with_field_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command that takes **fields show them as options."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = signature.replace(parameters=[*own, *_field_options()])
    command.__signature__ = shown  # type: ignore[attr-defined]
    return command


@_with_field_options
def ablate(
    model: options.ModelOption = "smollm2-135m",
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME,NAME,...",
            help=f"Of {options.choices(DATASETS)}.",
            rich_help_panel=_GRID,
            show_default="wikitext2, if no --text-file is given",
        ),
    ] = None,
    text_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--text-file",
            metavar="FILE",
            help="A UTF-8 text beside the datasets; may be given several times.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    context: Annotated[
        str,
        typer.Option(
            "--context", metavar="N,N,...", help="Tokens of a window.", rich_help_panel=_GRID
        ),
    ] = "4096",
    windows: Annotated[
        str,
        typer.Option(
            "--windows", help="Slice of the non-overlapping windows.", metavar="BEGIN:END"
        ),
    ] = "0:6",
    protocol: Annotated[
        str, typer.Option("--protocol", help=f"{options.choices(PROTOCOLS)}, as for ppl.")
    ] = "gptq",
    preset: Annotated[
        list[str],
        typer.Option(
            "--preset",
            metavar="PRESET[,NAME=VALUE...]",
            help="Settings of the fields that no option below names; may be given several times.",
        ),
    ] = [DEFAULT_PRESET],  # noqa: B006 (typer takes a list)
    dtype: options.DtypeOption = "float32",
    output: Annotated[
        Path,
        typer.Option(
            "--output", metavar="DIR", help="Folder for perplexity_ablation.csv and its parts."
        ),
    ] = Path("benchmark_results"),
    plot: Annotated[
        bool,
        typer.Option(
            "--plot/--no-plot",
            help="Also draw perplexity against attention flops, perplexity_ablation.png.",
        ),
    ] = True,
    lease: Annotated[
        float,
        typer.Option(
            "--lease",
            metavar="SECONDS",
            help="Silence after which the cell of another process is taken over.",
        ),
    ] = 60.0,
    threads: options.ThreadsOption = None,
    **fields: str | None,
) -> None:
    """Measure perplexity for every combination of settings.

    Each cell of the grid is a row of a CSV file. A stopped run goes on where it was, a larger grid
    adds its cells. Start the same command in several shells, on machines that share the folder, or
    by torchrun --nproc-per-node 4 -m h2o_prefill.cli ablate ... (accelerate launch likewise): they
    share the cells, and those of a process that died are run again. Layers are joined by "+":
    --dense-layers none,0,0+1.
    """
    from ..eval.ablation import run_ablation, worker_rank
    from ..eval.ablation_grid import build_grid, parse_values
    from ..eval.ablation_plot import plot_ablation
    from ..eval.ablation_store import CSV_NAME

    with quiet_libraries():
        rank, _ = worker_rank()
        if rank > 0:
            # One process speaks for all.
            warnings.simplefilter("ignore", UserWarning)
        base = list(parse_variants(preset).values())
        axes = {name: parse_values(name, text) for name, text in fields.items() if text is not None}
        contexts = parse_values("context", context)
        grid = build_grid(axes, contexts, base, protocol)
        for name in ("pandas", *(["matplotlib"] if plot else [])):
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"ablate needs {name}: pip install 'h2o_prefill[eval]'")
        options.use_threads(threads)
        with show_progress(f"loading {model}", _bar_with_estimate(rank)) as show:
            frame = run_ablation(
                model,
                axes,
                output,
                base=base,
                datasets=_corpora(dataset, text_file or []),
                contexts=contexts,
                windows=windows,
                protocol=protocol,
                dtype=dtype,
                lease_seconds=lease,
                on_progress=show,
            )
        if rank > 0:
            return
        title = f"{model} {dtype}, windows {windows}, {protocol}, {len(frame)} cells"
        print_wide(title, ablation_table(frame, grid.varied))
        csv_file = output.expanduser() / CSV_NAME
        say_written(csv_file)
        if plot:
            plot_ablation(frame, csv_file.with_suffix(".png"), title)
            say_written(csv_file.with_suffix(".png"))


def _corpora(dataset: str | None, files: list[Path]) -> list[Corpus]:
    names = ([] if files else ["wikitext2"]) if dataset is None else dataset.split(",")
    corpora = [load_text(name.strip()) for name in names]
    return corpora + [load_text(text_file=file) for file in files]


def _bar_with_estimate(rank: int) -> Progress:
    bar = progress_bar()
    bar.columns = (*bar.columns, TimeRemainingColumn())
    # A window may take minutes: the estimate is of the whole run, not of the last 30 seconds.
    bar.speed_estimate_period = float("inf")
    bar.disable = bar.disable or rank > 0
    return bar
