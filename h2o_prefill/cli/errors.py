"""Errors and Ctrl-C as the user sees them: one line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from h2o_prefill._errors import first_line
from h2o_prefill.cli.console import stderr

# Errors that the library raises on purpose. Any other is a bug and keeps its traceback.
_USAGE_ERRORS = (ValueError, FileNotFoundError)
_FAILURES = (OSError, ImportError, RuntimeError, ArithmeticError, MemoryError)


class OneLineErrors(TyperGroup):
    """A command group that reports expected errors in one line: exit code 2 for input, else 1."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a command line, --help if it is empty."""
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        stdout: Any = sys.stdout
        with contextlib.suppress(AttributeError):
            # "?" for letters that the terminal's encoding lacks, where Python would raise.
            stdout.reconfigure(errors="replace")
        try:
            code = super().main(args, *rest, **{**options, "standalone_mode": False})
        except Exception as error:
            code, text = _explain(error)
            if code is None or os.environ.get("H2O_PREFILL_DEBUG"):
                raise
            stderr.print(text, style="bold red")
            if isinstance(error, OSError):
                # Otherwise Python would flush to a full disk again on its way out.
                with contextlib.suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> None:
        """Run a command. Ctrl-C becomes an error that has a text."""
        with interrupt_text("partial results are not kept, existing result files are intact"):
            super().invoke(ctx)
            sys.stdout.flush()


@contextlib.contextmanager
def interrupt_text(text: str) -> Iterator[None]:
    """Let Ctrl-C in a block say what is left of its work."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Abort(text) from error


def _explain(error: Any) -> tuple[int | None, str]:
    """Return the exit code of an expected error, None for any other, and its line."""
    if isinstance(error, typer.Abort):
        return 130, f"interrupted: {error}"
    text = first_line(error)
    # Some versions of typer carry their own copy of click, so its errors are known by this method.
    if hasattr(error, "format_message"):
        code, text = error.exit_code, error.format_message()
    elif isinstance(error, _USAGE_ERRORS):
        code = 2
    else:
        code = 1 if isinstance(error, _FAILURES) else None
    if isinstance(error, ModuleNotFoundError):
        text += ": pip install 'h2o_prefill[eval]'"
    if isinstance(error, OSError) and error.strerror:
        # Without the number that Python puts in front.
        text = error.strerror + (f": {error.filename!r}" if error.filename else "")
    return code, f"error: {' '.join(text.split())}"
