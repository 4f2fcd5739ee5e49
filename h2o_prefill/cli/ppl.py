"""`h2o-prefill ppl`: perplexity on real text, dense against sparse."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from ..eval import PROTOCOLS
from ..presets import DEFAULT_PRESET
from . import options
from .console import error_console, output_console, quiet_libraries, say_written, show_progress
from .variants import parse_variant


def ppl(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of a window.")] = 4096,
    windows: Annotated[
        str,
        typer.Option(
            "--windows", help="Slice of the non-overlapping windows.", metavar="BEGIN:END"
        ),
    ] = "0:6",
    preset: options.PresetOption = DEFAULT_PRESET,
    chunk_size: options.ChunkSizeOption = None,
    local_window: options.LocalWindowOption = None,
    heavy_budget: options.HeavyBudgetOption = None,
    sink_tokens: options.SinkTokensOption = None,
    dtype: options.DtypeOption = "float32",
    protocol: Annotated[
        str,
        typer.Option(
            "--protocol",
            help=f"{options.choices(PROTOCOLS)}. The first scores every token, the second those in "
            "the second half of a window.",
        ),
    ] = "gptq",
    json_file: options.JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw perplexity by position (png, svg, pdf)."),
    ] = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Measure perplexity, dense and sparse on the same windows of a text."""
    from ..eval import check_settings, evaluate_perplexity, load_model, load_text
    from ..eval.plots import PLOT_SUFFIXES, plot_perplexity
    from ..eval.report import build_report, write_json
    from .tables import perplexity_table

    with quiet_libraries():
        config = parse_variant(
            preset,
            chunk_size=chunk_size,
            local_window=local_window,
            heavy_budget=heavy_budget,
            sink_tokens=sink_tokens,
        )
        options.check_output_file(json_file, "--json")
        options.check_output_file(plot, "--plot", PLOT_SUFFIXES)
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--plot needs matplotlib: pip install 'h2o_prefill[eval]'")
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
        output_console().print(title, perplexity_table(result), sep="\n", markup=False)
        if json_file is not None:
            report = build_report(
                result,
                model=model,
                dtype=dtype,
                dataset=corpus.name,
                text_source=corpus.source,
                preset=preset,
            )
            write_json(report, json_file)
            say_written(json_file)
        if plot is not None:
            plot_perplexity(result, plot, title.replace("\n", ", "))
            say_written(plot)
