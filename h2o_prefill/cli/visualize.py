"""`h2o-prefill visualize`: draw what the memory sets of a prompt hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .console import error_console, output_console, progress_bar, quiet_libraries
from .presets import preset_config


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
    ] = Path("attention_patterns"),
    preset: options.PresetOption = "spec",
    chunk_size: options.ChunkSizeOption = None,
    local_window: options.LocalWindowOption = None,
    heavy_budget: options.HeavyBudgetOption = None,
    sink_tokens: options.SinkTokensOption = None,
    dtype: options.DtypeOption = "float32",
    threads: options.ThreadsOption = None,
) -> None:
    """Draw which positions the heads of each layer keep, and how much attention they received."""
    from ..eval import load_model, load_text, visualize_attention_patterns
    from ..eval.patterns import check_prompt_length
    from ..eval.protocols import select_windows
    from ..eval.text import encode

    with quiet_libraries():
        config = preset_config(
            preset,
            chunk_size=chunk_size,
            local_window=local_window,
            heavy_budget=heavy_budget,
            sink_tokens=sink_tokens,
        )
        check_prompt_length(config, context, "context")
        if output.exists() and not output.is_dir():
            raise ValueError(f"--output must be a folder, got the file {str(output)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("figures need matplotlib: pip install 'h2o_prefill[eval]'")
        corpus = load_text(dataset, text_file)
        options.use_threads(threads)
        with error_console().status(f"loading {model}"):
            network, tokenizer = load_model(model, dtype)
        tokens = encode(tokenizer, corpus.text)
        _, prompts = select_windows(tokens, context, f"{window}:{window + 1}")
        title = (
            f"{model} {dtype}, {corpus.name} window {window} of {context} tokens, "
            f"S={config.chunk_size} L={config.local_window} H={config.heavy_budget} "
            f"K={config.sink_tokens}"
        )
        with progress_bar() as bar:
            task = bar.add_task("prefill", total=None)
            patterns = visualize_attention_patterns(
                network,
                prompts,
                config,
                output,
                title=title,
                on_progress=lambda done, total, what: bar.update(
                    task, completed=done, total=total, description=what
                ),
            )
        for path in patterns.paths.values():
            output_console().print(str(path), markup=False, soft_wrap=True)
