"""`h2o-prefill visualize`: draw what the memory sets of a prompt hold, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..presets import DEFAULT_PRESET
from . import options
from .console import error_console, output_console, quiet_libraries, say_written, show_progress
from .variants import parse_variant

if TYPE_CHECKING:
    import pandas as pd


def visualize(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of the prompt.")] = 4096,
    window: Annotated[
        int, typer.Option("--window", min=0, help="Which window of the text is the prompt.")
    ] = 0,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for the figures.")
    ] = Path("benchmark_results/attention_heatmaps"),
    ablation: Annotated[
        Path | None,
        typer.Option(
            "--ablation",
            metavar="FILE",
            help="A table of `ablate`: perplexity against attention flops, of this model.",
            show_default="perplexity_ablation.csv beside the output folder, if it has this model",
        ),
    ] = None,
    errors: Annotated[
        bool,
        typer.Option(
            "--errors/--no-errors", help="Also compare each head with dense attention, in a table."
        ),
    ] = True,
    preset: options.PresetOption = DEFAULT_PRESET,
    chunk_size: options.ChunkSizeOption = None,
    local_window: options.LocalWindowOption = None,
    heavy_budget: options.HeavyBudgetOption = None,
    sink_tokens: options.SinkTokensOption = None,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Draw which positions heads keep, what attention they received, and the errors that result.

    Writes PNG files, and index.html that shows them all.
    """
    from ..eval import load_model, load_text, visualize_attention_patterns
    from ..eval.environment import environment
    from ..eval.patterns import check_prompt_length
    from ..eval.protocols import select_windows
    from ..eval.report import write_json
    from ..eval.text import encode
    from .attention_table import attention_table

    with quiet_libraries():
        config = parse_variant(
            preset,
            chunk_size=chunk_size,
            local_window=local_window,
            heavy_budget=heavy_budget,
            sink_tokens=sink_tokens,
        )
        check_prompt_length(config, context, "context")
        options.check_output_folder(output)
        options.check_output_file(json_file, "--json")
        if json_file is not None and not errors:
            raise ValueError("--json holds the errors: it must not come with --no-errors")
        rows = _ablation_rows(ablation, output, model)
        corpus = load_text(dataset, text_file)
        options.use_threads(threads)
        with error_console().status(f"loading {model}"):
            network, tokenizer = load_model(model, dtype)
        tokens = encode(tokenizer, corpus.text)
        _, prompts = select_windows(tokens, context, f"{window}:{window + 1}")
        title = (
            f"{model} {dtype}, {corpus.name} window {window} of {context} tokens, "
            f"{options.describe_sizes(config)}"
        )
        with show_progress("prefill") as show:
            patterns = visualize_attention_patterns(
                network,
                prompts,
                config,
                output,
                title=title,
                errors=errors,
                ablation=rows,
                on_progress=show,
            )
        if patterns.measures is not None:
            output_console().print(
                title, attention_table(patterns.measures), sep="\n", markup=False
            )
        for path in (*patterns.paths.values(), patterns.page):
            output_console().print(str(path), markup=False, soft_wrap=True)
        if json_file is not None and patterns.measures is not None:
            report = patterns.measures.to_dict()
            origin = {
                "model": model,
                "dtype": dtype,
                "dataset": corpus.name,
                "text_source": corpus.source,
                "window": window,
                "context": context,
                "preset": preset,
            }
            report["config"] = {**origin, **report["config"]}
            write_json({"environment": environment(), **report}, json_file)
            say_written(json_file)


def _ablation_rows(file: Path | None, output: Path, model: str) -> pd.DataFrame | None:
    """Return the rows of a model in a table of `ablate`, None if no file is named nor found."""
    from ..eval.ablation_store import CSV_NAME
    from ..eval.ablation_table import read_rows, to_frame

    path = (output.parent / CSV_NAME if file is None else file).expanduser()
    if file is not None and not path.is_file():
        raise ValueError(f"--ablation: no such file: {str(file)!r}")
    rows = [row for row in read_rows(path) if row["model"] == model] if path.is_file() else []
    if file is not None and not rows:
        raise ValueError(f"--ablation must hold a row of the model {model!r}, got none")
    return to_frame(rows) if rows else None
