"""The options that benchmarks share, and how a function becomes a command that takes them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from common.plan import DEVICES, Lengths, make_plan
from common.shapes import SHAPES
from h2o_prefill.cli.console import error_console, quiet_libraries
from h2o_prefill.eval import DTYPES
from h2o_prefill.presets import PRESETS

JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Where the result goes. Default: results/ beside the benchmarks; none with --quick.",
    ),
]
ThreadsOption = Annotated[
    str | None,
    typer.Option("--threads", help="CPU threads, as 1,2. Default: 1, 2 and all cores."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"Comma-separated, of {', '.join(DTYPES)}. Default: the first 2, on CUDA bfloat16.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help=f"One of {', '.join(DEVICES)}.")]
ShapeOption = Annotated[
    str | None,
    typer.Option("--shape", help=f"Comma-separated, of {', '.join(SHAPES)}. Default: all."),
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=0.001, help="Time to spend on a row.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Tiny sizes: does it run? The figures mean nothing.")
]
LengthsOption = Annotated[
    str | None, typer.Option("--lengths", help="Tokens, comma-separated, ascending.")
]
PresetOption = Annotated[
    str, typer.Option("--preset", help=f"Sparse prefill settings, of {', '.join(PRESETS)}.")
]
TextFileOption = Annotated[
    Path | None,
    typer.Option(
        "--text-file", metavar="FILE", help="Text of the prompts. Default: Python's help."
    ),
]

# What is shown of an option, and its value where a benchmark says no other; in the order of --help.
_SHARED: dict[str, tuple[Any, Any]] = {
    "json": (JsonOption, None),
    "threads": (ThreadsOption, None),
    "dtype": (DtypeOption, None),
    "shape": (ShapeOption, None),
    "lengths": (LengthsOption, None),
    "preset": (PresetOption, "h2o"),
    "seconds": (SecondsOption, 1.0),
    "quick": (QuickOption, False),
    "device": (DeviceOption, "cpu"),
}


def benchmark(
    name: str, *names: str, lengths: Lengths | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a function that takes a `Plan` be called with the options that the plan is made of.

    The options are --json, --threads, --quick and those that are named here, and beside them what
    the function takes after its plan. What it declares under the name of a shared option stands in
    the place of that one.
    """
    asked = {"json", "threads", "quick", *names, *defaults, *(("lengths",) if lengths else ())}
    order = list(_SHARED)
    shared = [_parameter(option, defaults) for option in sorted(asked, key=order.index)]

    def change(main: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(main, eval_str=True)
        _, *own = (p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values())
        shown = {p.name: p for p in (*shared, *own)}.values()

        @functools.wraps(main)
        def run(**values: Any) -> None:
            given = {option: values[option] for option in asked}
            plan = make_plan(name, **given, default_lengths=lengths)
            main(plan, **{p.name: values[p.name] for p in own})

        # typer reads it. Options of the benchmark's own come first.
        in_order = sorted(shown, key=lambda p: order.index(p.name) if p.name in order else -1)
        run.__signature__ = signature.replace(parameters=in_order)  # type: ignore[attr-defined]
        return run

    return change


def _parameter(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    annotation, default = _SHARED[name]
    if name == "dtype" and name in defaults:
        text = f"Comma-separated. Default: {defaults[name]}."
        annotation = Annotated[str, typer.Option("--dtype", help=text, show_default=False)]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=defaults.get(name, default),
        annotation=annotation,
    )


def command(main: Callable[..., None]) -> typer.Typer:
    """Make a command line of one function. Expected errors are one line, and exit code 1."""

    @functools.wraps(main)
    def run(**arguments: Any) -> None:
        with quiet_libraries():
            try:
                main(**arguments)
            except (ValueError, FileNotFoundError, ImportError) as error:
                if os.environ.get("H2O_PREFILL_DEBUG"):
                    raise
                error_console().print(f"error: {error}", markup=False, soft_wrap=True)
                raise typer.Exit(1) from error

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    return app
