"""`h2o-prefill visualize`: draw memory sets, their errors and stability, and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import output_console, quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import check_output_folder, json_output, text_origin
from h2o_prefill.cli.result_table import print_result


@options.add_size_options
def visualize(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: Annotated[int, options.count("--context", "Prompt length in tokens.")] = 4096,
    window: Annotated[
        int, typer.Option(min=0, help="Index of the window of the text that is the prompt.")
    ] = 0,
    output: Annotated[
        Path, options.output_folder("Folder for the figures, created if necessary.")
    ] = Path("benchmark_results/attention_heatmaps"),
    figure_format: options.FormatOption = "png",
    preset: options.PresetOption = None,
    select: options.SelectOption = None,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Draw which positions memory sets keep, their errors and stability, and dense attention.

    Writes the figures memory, errors, stability and attention.
    """
    from h2o_prefill.cli.tables import attention_table
    from h2o_prefill.eval.plots import ATTENTION_FIGURES, visualize_attention_patterns
    from h2o_prefill.eval.report import build_report
    from h2o_prefill.eval.windows import select_windows
    from h2o_prefill.generation import load_text
    from h2o_prefill.generation.text import encode
    from h2o_prefill.profile import settings_name

    with quiet_libraries(), json_output(json_file) as save_json:
        options.check_preset(preset, **sizes)
        rule = options.parse_select(select)
        files = [f"{name}.{figure_format}" for name in ATTENTION_FIGURES]
        check_output_folder(output, files)
        corpus = load_text(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads)
        config = options.find_settings(network, preset, **sizes)
        tokens = encode(tokenizer, corpus.text)
        _, prompts = select_windows(tokens, context, f"{window}:{window + 1}")
        title = (
            f"{model} {dtype}, {corpus.name} window {window} of {context} tokens, "
            f"{options.describe(network, config, select)}"
        )
        with show_progress("prefill") as show:
            drawn: dict[str, Any] = {"title": title, "select": rule, "on_progress": show}
            measures = visualize_attention_patterns(
                network, prompts, config, output, figure_format, **drawn
            )
        report = measures.to_dict()
        name = settings_name(network, config)
        given = {"window": window, "context": context, "preset": name, "select": select}
        config_part = text_origin(model, dtype, corpus, **given) | report.pop("config")
        save_json(lambda: build_report(config_part, **report))
        print_result(title, attention_table(measures))
        for file in files:
            output_console().print(str(output / file), markup=False, soft_wrap=True)
