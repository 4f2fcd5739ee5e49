"""`h2o-prefill visualize`: draw memory sets and their errors."""

from __future__ import annotations

from pathlib import Path

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval.report import build_report
from h2o_prefill.generation.text import encode, select_windows


@options.command
def visualize(
    model: options.ModelOptions,
    text: options.TextOptions,
    *,
    preset: options.PresetOption = None,
    context: int = typer.Option(4096, min=1, help="Prompt length in tokens."),
    window: int = typer.Option(
        0, min=0, help="Index of the window of the text that is the prompt."
    ),
    output: Path = typer.Option(
        Path("benchmark_results/attention_heatmaps"),
        metavar="DIR",
        help="Folder for the figures, created if necessary.",
    ),
    figure_format: options.FormatOption = "png",
    report: outputs.ReportOptions,
) -> None:
    """Draw which positions memory sets keep, and their errors: the figures memory and errors."""
    from h2o_prefill.eval.plots import ATTENTION_FIGURES, visualize_attention_patterns

    report.check()
    config = options.find_settings(preset)
    files = [f"{name}.{figure_format}" for name in ATTENTION_FIGURES]
    outputs.check_output_folder(output, files)
    corpus = text.load()
    network, tokenizer = model.load()
    tokens = encode(tokenizer, corpus.text)
    _, prompts = select_windows(tokens, context, f"{window}:{window + 1}")
    name = config.to_string()
    title = f"{model}, {corpus.name} window {window} of {context} tokens, {name}"
    with console.show_progress("prefill") as show:
        measures = visualize_attention_patterns(
            network,
            prompts,
            config,
            output,
            figure_format,
            title=title,
            on_progress=show,
        )
    values = measures.to_dict()
    origin = model.origin(corpus, window=window, context=context, preset=name)
    origin |= values.pop("config")
    report.write(lambda: build_report(origin, **values))
    report.show(title, tables.attention_table(measures), *(output / file for file in files))
