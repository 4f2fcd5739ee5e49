"""The commands, put together."""

from __future__ import annotations

import typer

from . import ablate, bench, calibrate, generate, info, ppl, retrieve, visualize
from .errors import OneLineErrors

app = typer.Typer(
    name="h2o-prefill",
    cls=OneLineErrors,
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Chunked sparse prefill with an H2O memory set: measure it, run it.",
    epilog="H2O_PREFILL_DEBUG=1 shows the traceback of an error.",
)
app.command(name="ppl")(ppl.ppl)
app.command(name="ablate")(ablate.ablate)
app.command(name="calibrate")(calibrate.calibrate)
app.command(name="bench")(bench.bench)
app.command(name="retrieve")(retrieve.retrieve)
app.command(name="visualize")(visualize.visualize)
app.command(name="generate")(generate.generate)
app.command(name="info")(info.info)
