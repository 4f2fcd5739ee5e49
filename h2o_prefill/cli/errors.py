"""Errors and Ctrl-C as the user sees them: one line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from h2o_prefill.cli.console import ResultConsole, ctrl_c_remembered, discard_output, error_console

_USAGE, _FAILURE, _INTERRUPTED = 2, 1, 130
# The exit code that a shell reports for a program ended by SIGPIPE.
_CLOSED_PIPE = 128 + 13

# Errors that the library raises on purpose. Any other is a bug and keeps its traceback.
_USAGE_ERRORS = (ValueError, FileNotFoundError)
_FAILURES = (OSError, ImportError, RuntimeError, ArithmeticError, MemoryError)

_NOTHING_KEPT = "partial results are not kept, existing result files are intact"


class _Interrupted(Exception):
    """Ctrl-C; its text says what is kept."""


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
            code = super().main(args, *rest, **{**options, "standalone_mode": False}) or 0
        except Exception as error:
            found = _exit_code(error)
            if found is None or os.environ.get("H2O_PREFILL_DEBUG"):
                raise
            code = found
            error_console().print(_one_line(error), style="bold red", markup=False, soft_wrap=True)
            if isinstance(error, OSError):
                # Otherwise Python would flush to a full disk again on its way out.
                discard_output(sys.stdout)
        sys.exit(_CLOSED_PIPE if ResultConsole.closed else code)

    def invoke(self, ctx: Any) -> None:
        """Run a command. Ctrl-C becomes an error that has a text."""
        try:
            with ctrl_c_remembered():
                super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt as error:
            raise _Interrupted(str(error) or _NOTHING_KEPT) from error
        except BrokenPipeError:
            # Before click, which would end with another exit code.
            ResultConsole.closed = True
            discard_output(sys.stdout)


@contextlib.contextmanager
def kept_on_interrupt(what: str) -> Iterator[None]:
    """Let Ctrl-C in a block say what is kept of its work, and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what) from None


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an expected error, None for any other."""
    if isinstance(error, (_Interrupted, typer.Abort)):
        return _INTERRUPTED
    # Some versions of typer carry their own copy of click, so its errors are known by this method.
    if hasattr(error, "format_message"):
        return getattr(error, "exit_code", _USAGE)
    if isinstance(error, _USAGE_ERRORS):
        return _USAGE
    return _FAILURE if isinstance(error, _FAILURES) else None


def _one_line(error: Exception) -> str:
    if isinstance(error, (_Interrupted, typer.Abort)):
        return f"interrupted: {str(error) or _NOTHING_KEPT}"
    text = str(error)
    if hasattr(error, "format_message"):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror:
        # Without the number that Python puts in front.
        text = error.strerror + (f": {error.filename!r}" if error.filename else "")
    return f"error: {' '.join(text.split()) or type(error).__name__}"
