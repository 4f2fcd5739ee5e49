"""`h2o-prefill retrieve`: needles in long prompts, dense against sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval.retrieval import (
    DEPTHS,
    LENGTHS,
    KeptOutcomes,
    check_retrieval,
    evaluate_retrieval,
    retrieval_report,
)
from h2o_prefill.eval.retrieval_prompts import TASKS


@options.command
def retrieve(
    model: options.ModelOptions,
    text: options.TextOptions,
    cluster: options.ClusterOptions,
    *,
    tasks: str = typer.Option(
        ",".join(TASKS),
        metavar="NAME,NAME,...",
        help=f"Tasks to run, of {', '.join(TASKS)}.",
        show_default="all",
    ),
    lengths: str = typer.Option(
        ",".join(map(str, LENGTHS)), metavar="N,N,...", help="Tokens of prompt and answer together."
    ),
    depths: str = typer.Option(
        ",".join(map(str, DEPTHS)), metavar="N,N,...", help="Percent of the text before the needle."
    ),
    prompts: int = typer.Option(1, min=1, help="Prompts per task, length and depth."),
    question: str = typer.Option("last", help="Put the question last or first."),
    preset: Annotated[
        list[str] | None,
        options.preset_option("Settings to compare with dense prefill; repeatable"),
    ] = None,
    seed: int = typer.Option(
        0, help="Random seed of needles and texts; equal seeds give equal prompts."
    ),
    keep: Path | None = typer.Option(
        None,
        metavar="FILE.jsonl",
        help="File of prompts that are done; the same command continues with the others.",
    ),
    report: outputs.PlotOptions,
) -> None:
    """Measure needle-in-a-haystack retrieval after dense and after sparse prefill.

    Facts (needles) are hidden in a text (the haystack), and the model is asked for them. The tasks
    have the form of RULER's. In the table, accuracy is the mean score, and kept is how many of the
    prompts solved after dense prefill are also solved after sparse prefill. The last column has the
    mean log-probability per token of the expected answer after dense prefill, and its change after
    sparse prefill. On a Dask cluster every worker answers prompts.
    """
    from h2o_prefill.eval.plots import plot_retrieval

    report.check()
    configs = options.all_settings(preset)
    wanted: dict[str, Any] = {
        "tasks": tasks.split(","),
        "lengths": options.parse_numbers(lengths, "lengths"),
        "depths": options.parse_numbers(depths, "depths"),
        "prompts_per_cell": prompts,
        "question": question,
    }
    check_retrieval(**wanted)
    if keep is not None:
        outputs.check_output_file(keep, "--keep", (".jsonl",))
    kept = None if keep is None else KeptOutcomes(keep)
    corpus = text.load()
    network, tokenizer = model.load()
    with cluster.connect(model) as workers, console.show_progress("retrieval") as show:
        result = evaluate_retrieval(
            network,
            corpus,
            {config.to_string(): config for config in configs},
            tokenizer=tokenizer,
            seed=seed,
            kept=kept,
            cluster=workers,
            on_progress=show,
            **wanted,
        )
    title = f"{model}\nneedles in {corpus.name}, question {question}"
    report.write(lambda: retrieval_report(result, model=model.model, dtype=model.dtype))
    report.draw(plot_retrieval, result, title)
    report.show(title, tables.retrieval_table(result))
