"""`h2o-prefill visualize`: draw what the memory sets of a prompt hold, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import output_console, quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network, parse_variant
from h2o_prefill.cli.outputs import check_output_folder, json_output, text_origin
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.presets import DEFAULT_PRESET

if TYPE_CHECKING:
    import pandas as pd


@options.add_size_options
def visualize(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: Annotated[int, options.count("--context", "Prompt length in tokens.")] = 4096,
    window: Annotated[
        int,
        typer.Option("--window", min=0, help="Index of the window of the text that is the prompt."),
    ] = 0,
    output: Annotated[
        Path,
        options.output_folder("Folder for the figures, created if necessary."),
    ] = Path("benchmark_results/attention_heatmaps"),
    ablation: Annotated[
        Path | None,
        typer.Option(
            "--ablation",
            metavar="FILE",
            help="CSV file that the command ablate wrote: also draw its perplexities of this model "
            "against attention flops.",
            show_default="perplexity_ablation.csv beside the output folder, if it has rows of this "
            "model",
        ),
    ] = None,
    errors: Annotated[
        bool,
        typer.Option(
            "--errors/--no-errors",
            help="Also compare each head with dense attention, and print a table of the errors.",
        ),
    ] = True,
    preset: options.PresetOption = DEFAULT_PRESET,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Draw which positions memory sets keep, what attention they received, and the errors.

    Writes the figures as PNG files, and index.html, which shows and explains all of them.
    """
    from h2o_prefill.cli.tables import attention_table
    from h2o_prefill.eval import load_text, visualize_attention_patterns
    from h2o_prefill.eval.attention.pattern_page import FILES
    from h2o_prefill.eval.attention.patterns import check_prompt_length
    from h2o_prefill.eval.environment import environment
    from h2o_prefill.eval.inputs.text import encode
    from h2o_prefill.eval.perplexity.windows import select_windows

    with quiet_libraries(), json_output(json_file) as save_json:
        config = parse_variant(preset, **sizes)
        check_prompt_length(config, context, "context")
        check_output_folder(output, FILES)
        if json_file is not None and not errors:
            raise ValueError("--json holds the errors: it must not come with --no-errors")
        rows = _ablation_rows(ablation, output, model)
        corpus = load_text(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads)
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
            print_result(title, attention_table(patterns.measures))
        for path in (*patterns.paths.values(), patterns.page):
            output_console().print(str(path), markup=False, soft_wrap=True)
        if patterns.measures is not None:
            report = patterns.measures.to_dict()
            prompt = {"window": window, "context": context}
            origin = text_origin(model, dtype, corpus, **prompt, preset=preset)
            report["config"] = {**origin, **report["config"]}
            save_json(lambda: {"environment": environment(), **report})


def _ablation_rows(file: Path | None, output: Path, model: str) -> pd.DataFrame | None:
    """Return the rows of a model in a table of `ablate`, None if no file is named nor found."""
    from h2o_prefill.eval.ablation.table import CSV_NAME, read_rows, to_frame

    path = (output.parent / CSV_NAME if file is None else file).expanduser()
    if file is not None and not path.is_file():
        what = "must be a file, got the folder" if path.is_dir() else "no such file:"
        raise ValueError(f"--ablation: {what} {str(file)!r}")
    rows = []
    if path.is_file():
        # A table of another origin may have no model in a row.
        rows = [row for row in read_rows(path) if str(row["model"]) == model]
    if file is not None and not rows:
        raise ValueError(f"--ablation must hold a row of the model {model!r}, got none")
    return to_frame(rows) if rows else None
