"""The command line, `h2o-prefill`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; exit with what to install if a package is missing."""
    try:
        from h2o_prefill.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the command line needs the package {error.name}: "
            "pip install 'h2o_prefill[eval]'"
        )
    app(prog_name="h2o-prefill")
