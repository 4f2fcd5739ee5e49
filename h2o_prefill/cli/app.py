"""The command group `h2o-prefill`."""

from __future__ import annotations

import typer

from h2o_prefill import __version__
from h2o_prefill.cli.ablate import ablate
from h2o_prefill.cli.bench import bench
from h2o_prefill.cli.compare import compare
from h2o_prefill.cli.errors import OneLineErrors
from h2o_prefill.cli.export import export
from h2o_prefill.cli.generate import generate
from h2o_prefill.cli.info import info
from h2o_prefill.cli.ppl import ppl
from h2o_prefill.cli.retrieve import retrieve
from h2o_prefill.cli.visualize import visualize


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"h2o-prefill {__version__}")
        raise typer.Exit


app = typer.Typer(
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
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    pass


_MEASURING = (compare, ppl, ablate, bench, retrieve, visualize)
for _command in (*_MEASURING, generate, export, info):
    app.command()(_command)
