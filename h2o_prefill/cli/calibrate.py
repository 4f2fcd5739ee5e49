"""`h2o-prefill calibrate`: the layers of a model that need larger memory sets."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import output_console, quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network, parse_variant
from h2o_prefill.cli.outputs import json_output, text_origin
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.presets import DEFAULT_PRESET


def calibrate(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: options.ContextOption = 4096,
    windows: options.WindowsOption = "0:1",
    layers: Annotated[int, options.count("--layers", "Number of layers to choose.")] = 6,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            help="What the chosen layers become: wide gives them larger memory sets, dense keeps "
            "their attention exact, at a cost quadratic in the prompt length.",
        ),
    ] = "wide",
    preset: options.PresetOption = DEFAULT_PRESET,
    dtype: options.DtypeOption = "bfloat16",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Find the layers whose sparse attention changes the model's predictions most.

    Each layer in turn is made dense while all others stay sparse, and the predictions are compared
    with those of the dense model: one forward pass per layer and window. Use a text of the kind
    that the model will read. Prints the settings in the form that --preset takes.
    """
    from h2o_prefill.cli.tables import calibration_table
    from h2o_prefill.eval import calibrate_layers, load_text
    from h2o_prefill.eval.calibration import KEPT
    from h2o_prefill.eval.environment import environment

    with quiet_libraries(), json_output(json_file) as save_json:
        config = parse_variant(preset)
        corpus = load_text(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads)
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
        origin = text_origin(model, dtype, corpus, preset=preset, variant=variant)
        save_json(lambda: {"environment": environment(), **origin, **dataclasses.asdict(result)})
        print_result(title, calibration_table(result, chosen, keep))
        output_console().print(f"--preset {variant}", markup=False, soft_wrap=True)
