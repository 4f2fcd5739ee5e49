"""The command line, `h2o-prefill`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["load", "main"]


def main() -> None:
    """Run the command line."""
    load()(prog_name="h2o-prefill")


def load() -> Typer:
    """Import the commands; exit with what to install if a package is missing."""
    try:
        from h2o_prefill.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the command line needs the package {error.name}: "
            "pip install 'h2o_prefill[eval]'"
        )
    return app
