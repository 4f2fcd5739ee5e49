"""`h2o-prefill calibrate`: which layers of a model to spend more on."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..presets import DEFAULT_PRESET
from . import options
from .console import (
    error_console,
    output_console,
    print_wide,
    quiet_libraries,
    say_written,
    show_progress,
)
from .variants import parse_variant


def calibrate(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of a window.")] = 4096,
    windows: Annotated[
        str,
        typer.Option(
            "--windows", help="Slice of the non-overlapping windows.", metavar="BEGIN:END"
        ),
    ] = "0:1",
    layers: Annotated[int, typer.Option("--layers", min=1, help="How many to choose.")] = 6,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            help="What becomes of them: wide, with larger memory sets, or dense, at a cost that "
            "grows with the square of the prompt.",
        ),
    ] = "wide",
    preset: options.PresetOption = DEFAULT_PRESET,
    dtype: options.DtypeOption = "bfloat16",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Find the layers that lose most when they are sparse, on a text like those to come.

    One forward pass a layer and window. Prints the settings as --preset takes them.
    """
    from ..eval import calibrate_layers, load_model, load_text
    from ..eval.calibration import KEPT
    from ..eval.environment import environment
    from ..eval.report import write_json
    from .tables import calibration_table

    with quiet_libraries():
        config = parse_variant(preset)
        options.check_output_file(json_file, "--json")
        corpus = load_text(dataset, text_file)
        options.use_threads(threads)
        with error_console().status(f"loading {model}"):
            network, tokenizer = load_model(model, dtype)
        with show_progress("calibrate") as show:
            result = calibrate_layers(
                network,
                corpus,
                config,
                layers=layers,
                keep=keep,
                tokenizer=tokenizer,
                context=context,
                windows=windows,
                on_progress=show,
            )
        chosen = getattr(result.config, KEPT[keep])
        variant = f"{preset},{KEPT[keep]}={'+'.join(map(str, chosen))}"
        title = f"{model} {dtype}, {corpus.name} windows {windows} of {context} tokens, {preset}"
        print_wide(title, calibration_table(result, chosen, keep))
        output_console().print(f"--preset {variant}", markup=False, soft_wrap=True)
        if json_file is not None:
            origin = {
                "model": model,
                "dtype": dtype,
                "dataset": corpus.name,
                "text_source": corpus.source,
                "preset": preset,
                "variant": variant,
            }
            values = {**origin, **dataclasses.asdict(result)}
            write_json({"environment": environment(), **values}, json_file)
            say_written(json_file)
