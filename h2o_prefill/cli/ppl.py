"""`h2o-prefill ppl`: perplexity on real text, dense against sparse."""

from __future__ import annotations

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval import evaluate_perplexity
from h2o_prefill.eval.perplexity import perplexity_report
from h2o_prefill.generation.text import parse_windows


@options.command
def ppl(
    model: options.ModelOptions,
    text: options.TextOptions,
    *,
    preset: options.PresetOption = None,
    context: int = typer.Option(4096, min=1, help="Window length in tokens."),
    windows: options.WindowsOption = "0:6",
    report: outputs.ReportOptions,
) -> None:
    """Measure perplexity with dense and with sparse prefill on the same windows of a text."""
    report.check()
    config = options.find_settings(preset)
    parse_windows(windows)
    corpus = text.load()
    network, tokenizer = model.load()
    with console.show_progress("perplexity") as show:
        result = evaluate_perplexity(
            network,
            corpus,
            config,
            tokenizer=tokenizer,
            context=context,
            windows=windows,
            on_progress=show,
        )
    name = config.to_string()
    title = f"{model}, {corpus.name} windows {windows} of {context} tokens\n{name}"
    origin = model.origin(corpus, preset=name)
    report.write(lambda: perplexity_report(result, **origin))
    report.show(title, tables.perplexity_table(result))
