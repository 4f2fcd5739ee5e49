"""The command group `h2o-prefill`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from h2o_prefill import __version__
from h2o_prefill.cli import (
    ablate,
    bench,
    calibrate,
    compare,
    export,
    generate,
    info,
    ppl,
    retrieve,
    serve,
    visualize,
)
from h2o_prefill.cli.errors import OneLineErrors


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"h2o-prefill {__version__}")
        raise typer.Exit


# Below this width rich's boxes leave no room for the names of options.
_NARROW = 56

app = typer.Typer(
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _NARROW else None,
    name="h2o-prefill",
    cls=OneLineErrors,
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sparse prefill for long prompts (chunked attention with H2O memory sets): measure its "
    "quality and speed, and run it.",
    epilog="With H2O_PREFILL_DEBUG=1 in the environment, errors show their traceback.",
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


for _command in (
    compare.compare,
    ppl.ppl,
    ablate.ablate,
    calibrate.calibrate,
    bench.bench,
    retrieve.retrieve,
    visualize.visualize,
    generate.generate,
    export.export,
    serve.serve,
    info.info,
):
    app.command()(_command)
