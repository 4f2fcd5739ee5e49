"""Errors as the user sees them: one red line on stderr, and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from .console import error_console

USAGE = 2
FAILURE = 1
INTERRUPTED = 130

# What the library raises on purpose. Anything else is a mistake of ours and keeps its traceback.
_USAGE_ERRORS = (ValueError, FileNotFoundError)
_FAILURES = (OSError, ImportError, RuntimeError, ArithmeticError, MemoryError)


class OneLineErrors(TyperGroup):
    """A command group that says expected errors in a line: exit code 2 for wrong input, else 1."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; see `click.Command.main`."""
        if not (sys.argv[1:] if args is None else args):
            args = ["--help"]
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            if not standalone_mode or os.environ.get("H2O_PREFILL_DEBUG"):
                raise
            code = _exit_code(error)
            if code is None:
                raise
            error_console().print(
                f"error: {_one_line(error)}", style="bold red", markup=False, soft_wrap=True
            )
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an expected error, None for any other."""
    if isinstance(error, typer.Abort):
        return INTERRUPTED
    # click's own errors; typer carries its copy of click in some versions, so they are known by
    # their shape
    if callable(getattr(error, "format_message", None)):
        return getattr(error, "exit_code", USAGE)
    if isinstance(error, _USAGE_ERRORS):
        return USAGE
    if isinstance(error, _FAILURES):
        return FAILURE
    return None


def _one_line(error: Exception) -> str:
    format_message = getattr(error, "format_message", None)
    text = format_message() if callable(format_message) else str(error)
    if isinstance(error, typer.Abort):
        text = "interrupted"
    return " ".join(text.split()) or type(error).__name__
