"""`h2o-prefill retrieve`: needles in long prompts, dense against sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.cluster import ClusterOptions, add_cluster_options
from h2o_prefill.cli.console import quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import check_output_file, json_output, plot_output
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.cli.tables import retrieval_table
from h2o_prefill.eval.retrieval import DEPTHS, LENGTHS
from h2o_prefill.eval.retrieval_prompts import TASKS


@add_cluster_options
def retrieve(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help=f"Tasks to run, of {', '.join(TASKS)}.",
            show_default="all",
        ),
    ] = ",".join(TASKS),
    lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens of prompt and answer together.")
    ] = ",".join(map(str, LENGTHS)),
    depths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Percent of the text before the needle.")
    ] = ",".join(map(str, DEPTHS)),
    prompts: Annotated[int, options.count("--prompts", "Prompts per task, length and depth.")] = 1,
    question: Annotated[str, typer.Option(help="Put the question last or first.")] = "last",
    preset: Annotated[
        list[str] | None,
        options.preset_option("Settings to compare with dense prefill; repeatable"),
    ] = None,
    select: options.SelectOption = None,
    seed: Annotated[
        int, typer.Option(help="Random seed of needles and texts; equal seeds give equal prompts.")
    ] = 0,
    dtype: options.DtypeOption = "float32",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE.jsonl",
            help="File of prompts that are done; the same command goes on with the others.",
        ),
    ] = None,
    json_file: options.JsonOption = None,
    plot: Annotated[Path | None, options.plot_file("the mean score by length and depth")] = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    *,
    cluster: ClusterOptions,
) -> None:
    """Measure needle-in-a-haystack retrieval after dense and after sparse prefill.

    Facts (needles) are hidden in a text (the haystack), and the model is asked for them. The tasks
    have the form of RULER's. In the table, accuracy is the mean score, and kept is how many of the
    prompts solved after dense prefill are also solved after sparse prefill. The last column has the
    mean log-probability per token of the expected answer after dense prefill, and its change after
    sparse prefill. On a Dask cluster every worker answers prompts.
    """
    from h2o_prefill.eval import evaluate_retrieval
    from h2o_prefill.eval.plots import plot_retrieval
    from h2o_prefill.eval.retrieval import KeptOutcomes, check_retrieval, retrieval_report
    from h2o_prefill.generation import load_text
    from h2o_prefill.profile import settings_name

    with quiet_libraries(), json_output(json_file) as save_json:
        for text in preset or ():
            options.check_preset(text)
        rule = options.parse_select(select)
        save_plot = plot_output(plot)
        settings: dict[str, Any] = {
            "tasks": tasks.split(","),
            "lengths": options.parse_numbers(lengths, "lengths"),
            "depths": options.parse_numbers(depths, "depths"),
            "prompts_per_cell": prompts,
            "question": question,
        }
        check_retrieval(**settings)
        if keep is not None:
            check_output_file(keep, "--keep", (".jsonl",))
        kept = None if keep is None else KeptOutcomes(keep)
        corpus = load_text(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads, device)
        configs = [options.find_settings(network, text) for text in preset or (None,)]
        with (
            cluster.connect(model, dtype, threads, device) as workers,
            show_progress("retrieval") as show,
        ):
            result = evaluate_retrieval(
                network,
                corpus,
                {settings_name(network, config): config for config in configs},
                tokenizer=tokenizer,
                seed=seed,
                select=rule,
                kept=kept,
                cluster=workers,
                on_progress=show,
                **settings,
            )
        title = f"{model} {dtype}\nneedles in {corpus.name}, question {question}"
        title += f", select={select}" if select else ""
        save_json(lambda: retrieval_report(result, model=model, dtype=dtype))
        save_plot(plot_retrieval, result, title)
        print_result(title, retrieval_table(result))
