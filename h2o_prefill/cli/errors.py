"""Errors as the user sees them: one red line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from h2o_prefill.cli.console import ResultConsole, discard_output, error_console
from h2o_prefill.cli.interrupts import interrupts_remembered

USAGE = 2
FAILURE = 1
INTERRUPTED = 130
# What a shell reports of a program that a closed pipe has ended.
CLOSED_PIPE = 128 + signal.SIGPIPE

# What the library raises on purpose. Anything else is a mistake of ours and keeps its traceback.
_USAGE_ERRORS = (ValueError, FileNotFoundError)
_FAILURES = (OSError, ImportError, RuntimeError, ArithmeticError, MemoryError)

_NOTHING_KEPT = "partial results are not kept, existing result files are intact"


class _Interrupted(Exception):
    """Ctrl-C; its text says what is kept."""


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
        if standalone_mode:
            _replace_unknown_letters()
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            if not standalone_mode or os.environ.get("H2O_PREFILL_DEBUG"):
                raise
            code = _exit_code(error)
            if code is None:
                raise
            if code != CLOSED_PIPE:
                error_console().print(
                    _one_line(error), style="bold red", markup=False, soft_wrap=True
                )
        if not standalone_mode:
            return code
        if not _flush():
            code = code or FAILURE
        sys.exit(CLOSED_PIPE if ResultConsole.closed else code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; see `click.Command.invoke`. Ctrl-C becomes an error that has a text."""
        try:
            with interrupts_remembered():
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted(str(error) or _NOTHING_KEPT) from error
        except BrokenPipeError:
            # Before click, which would end with another exit code.
            ResultConsole.closed = True
            return None


@contextlib.contextmanager
def kept_on_interrupt(what: str) -> Iterator[None]:
    """Let Ctrl-C in a block say what is kept of its work, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what) from None


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an expected error, None for any other."""
    if isinstance(error, (_Interrupted, typer.Abort)):
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
    if isinstance(error, (_Interrupted, typer.Abort)):
        return f"interrupted: {str(error) or _NOTHING_KEPT}"
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        text = format_message()
    elif isinstance(error, OSError) and error.strerror:
        # Without the number that Python puts in front.
        text = error.strerror + (f": {error.filename!r}" if error.filename else "")
    else:
        text = str(error)
    return f"error: {' '.join(text.split()) or type(error).__name__}"


def _replace_unknown_letters() -> None:
    """Print "?" for what the terminal's encoding lacks, where Python would raise."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _flush() -> bool:
    """Write what stdout still holds; False if that fails, as on a full disk."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Python would try again on its way out, and print a traceback.
        discard_output(sys.stdout)
        return False
    return True
