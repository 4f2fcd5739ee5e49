"""`h2o-prefill ppl`: perplexity on real text, dense against sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import error_console, quiet_libraries, say_written, show_progress
from h2o_prefill.cli.outputs import check_plot, json_output
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.cli.variants import parse_variant
from h2o_prefill.presets import DEFAULT_PRESET


@options.add_size_options
def ppl(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: options.ContextOption = 4096,
    windows: options.WindowsOption = "0:6",
    preset: options.PresetOption = DEFAULT_PRESET,
    dtype: options.DtypeOption = "float32",
    protocol: options.ProtocolOption = "gptq",
    json_file: options.JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw perplexity by position into this file (.png, .svg or .pdf).",
        ),
    ] = None,
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Measure perplexity with dense and with sparse prefill on the same windows of a text."""
    from h2o_prefill.cli.tables import perplexity_table
    from h2o_prefill.eval import check_settings, evaluate_perplexity, load_model, load_text
    from h2o_prefill.eval.perplexity.plot import plot_perplexity
    from h2o_prefill.eval.perplexity.result import perplexity_report

    with quiet_libraries(), json_output(json_file) as save_json:
        config = parse_variant(preset, **sizes)
        check_plot(plot)
        check_settings(config, context, windows, protocol)
        corpus = load_text(dataset, text_file)
        options.use_threads(threads)
        with error_console().status(f"loading {model}"):
            network, tokenizer = load_model(model, dtype)
        with show_progress("perplexity") as show:
            result = evaluate_perplexity(
                network,
                corpus,
                config,
                tokenizer=tokenizer,
                context=context,
                windows=windows,
                protocol=protocol,
                on_progress=show,
            )
        title = (
            f"{model} {dtype}, {corpus.name} windows {windows} of {context} tokens, {protocol}\n"
            f"{options.describe_sizes(config)}"
        )
        print_result(title, perplexity_table(result))
        if json_file is not None:
            report = perplexity_report(
                result,
                model=model,
                dtype=dtype,
                dataset=corpus.name,
                text_source=corpus.source,
                preset=preset,
            )
            save_json(report)
        if plot is not None:
            plot_perplexity(result, plot, title.replace("\n", ", "))
            say_written(plot)
