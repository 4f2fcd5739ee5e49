"""`h2o-prefill ppl`: perplexity on real text, dense against sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import json_output, plot_output, text_origin
from h2o_prefill.cli.result_table import print_result


@options.add_size_options
def ppl(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: options.ContextOption = 4096,
    windows: options.WindowsOption = "0:6",
    preset: options.PresetOption = None,
    select: options.SelectOption = None,
    dtype: options.DtypeOption = "float32",
    protocol: options.ProtocolOption = "gptq",
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Also measure on the tokens that need the long context (LongPPL). Takes dense "
            "runs of 2048 tokens over the whole window.",
        ),
    ] = False,
    json_file: options.JsonOption = None,
    plot: Annotated[Path | None, options.plot_file("perplexity by position")] = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Measure perplexity with dense and with sparse prefill on the same windows of a text."""
    from h2o_prefill.cli.tables import perplexity_table
    from h2o_prefill.eval import evaluate_perplexity
    from h2o_prefill.eval.perplexity import perplexity_report
    from h2o_prefill.eval.plots import plot_perplexity
    from h2o_prefill.eval.windows import parse_windows, scored_rows
    from h2o_prefill.generation import load_text
    from h2o_prefill.profile import settings_name

    with quiet_libraries(), json_output(json_file) as save_json:
        options.check_preset(preset, **sizes)
        rule = options.parse_select(select)
        save_plot = plot_output(plot)
        scored_rows(protocol, context)
        parse_windows(windows)
        corpus = load_text(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads, device)
        config = options.find_settings(network, preset, **sizes)
        with show_progress("perplexity") as show:
            result = evaluate_perplexity(
                network,
                corpus,
                config,
                tokenizer=tokenizer,
                context=context,
                windows=windows,
                protocol=protocol,
                key_tokens=long,
                select=rule,
                on_progress=show,
            )
        title = (
            f"{model} {dtype}, {corpus.name} windows {windows} of {context} tokens, {protocol}\n"
            f"{options.describe(network, config, select)}"
        )
        origin = text_origin(model, dtype, corpus, preset=settings_name(network, config))
        save_json(lambda: perplexity_report(result, **origin))
        save_plot(plot_perplexity, result, title)
        print_result(title, perplexity_table(result))
