"""`h2o-prefill retrieve`: needles in long prompts, dense against sparse."""

from __future__ import annotations

from typing import Annotated

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval.retrieval import DEPTHS, LENGTHS, evaluate_retrieval, retrieval_report
from h2o_prefill.eval.retrieval_prompts import TASKS


@options.command
def retrieve(
    model: options.ModelOptions,
    text: options.TextOptions,
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
    preset: Annotated[
        list[str] | None,
        options.preset_option("Settings to compare with dense prefill; repeatable"),
    ] = None,
    seed: int = typer.Option(
        0, help="Random seed of needles and texts; equal seeds give equal prompts."
    ),
    report: outputs.ReportOptions,
) -> None:
    """Measure needle-in-a-haystack retrieval after dense and after sparse prefill.

    Facts (needles) are hidden in a text (the haystack), and the model is asked for them. The tasks
    have the form of RULER's. In the table, accuracy is the mean score, and kept is how many of the
    prompts solved after dense prefill are also solved after sparse prefill. The last column has the
    mean log-probability per token of the expected answer after dense prefill, and its change after
    sparse prefill.
    """
    report.check()
    configs = [options.find_settings(text) for text in preset or (None,)]
    numbers = {
        "lengths": options.parse_numbers(lengths, "lengths"),
        "depths": options.parse_numbers(depths, "depths"),
    }
    corpus = text.load()
    network, tokenizer = model.load()
    with console.show_progress("retrieval") as show:
        result = evaluate_retrieval(
            network,
            corpus,
            {config.to_string(): config for config in configs},
            tokenizer=tokenizer,
            tasks=tasks.split(","),
            prompts_per_cell=prompts,
            seed=seed,
            on_progress=show,
            **numbers,
        )
    title = f"{model}\nneedles in {corpus.name}"
    report.write(lambda: retrieval_report(result, model=model.model, dtype=model.dtype))
    report.show(title, tables.retrieval_table(result))
