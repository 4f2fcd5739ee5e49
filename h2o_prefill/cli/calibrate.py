"""`h2o-prefill calibrate`: the KV heads of a model that need larger memory sets."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from h2o_prefill.cli import console, options, outputs, tables
from h2o_prefill.eval import calibrate_heads
from h2o_prefill.eval.report import environment
from h2o_prefill.presets import DEFAULT_PRESET
from h2o_prefill.profile import profile_path


@options.command
def calibrate(
    model: options.Bfloat16ModelOptions,
    text: options.TextOptions,
    cluster: options.ClusterOptions,
    *,
    context: options.ContextOption = 4096,
    windows: options.WindowsOption = "0:1",
    budget: float = typer.Option(1.1, help="Attention flops of the result, relative to --preset."),
    preset: Annotated[
        str, options.preset_option("Settings to widen heads of", True)
    ] = DEFAULT_PRESET,
    save: bool = typer.Option(
        False,
        "--save",
        help="Write h2o_prefill.json, from which enable(model) takes the settings, into the "
        "model's folder, or into the user's cache.",
    ),
    report: outputs.PlotOptions,
) -> None:
    """Find the KV heads whose sparse attention changes the model's residual stream most.

    The model runs once and densely, and beside it each layer sparsely with memory sets of several
    sizes. The heads that gain most by larger sets get them, until the budget is spent. Use a text
    of the kind that the model will read. Prints the settings in the form that --preset takes. On a
    Dask cluster every worker measures windows.
    """
    from h2o_prefill.eval.plots import plot_calibration

    report.check()
    (settings,) = options.all_settings([preset])
    corpus = text.load()
    network, tokenizer = model.load()
    config = settings.find(network)
    if save:
        path = profile_path(network)
        outputs.check_output_folder(path.parent, [path.name], "--save")
    with cluster.connect(model) as workers, console.show_progress("calibrate") as show:
        result = calibrate_heads(
            network,
            corpus,
            config,
            budget=budget,
            tokenizer=tokenizer,
            context=context,
            windows=windows,
            cluster=workers,
            on_progress=show,
        )
    variant = result.config.to_string()
    title = f"{model}, {corpus.name} windows {windows} of {context} tokens\n"
    title += options.describe(network, config)
    name = options.settings_name(network, config)
    origin = model.origin(corpus, preset=name, variant=variant, budget=budget)
    report.write(lambda: {"environment": environment(), **origin, **dataclasses.asdict(result)})
    report.draw(plot_calibration, result, title)
    if save:
        console.stderr.print(f"wrote {result.save(network)}")
    report.show(title, tables.calibration_table(result), f"--preset {variant}")
