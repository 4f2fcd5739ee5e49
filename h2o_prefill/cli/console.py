"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from h2o_prefill.cli.interrupts import check_interrupt


class ResultConsole(Console):
    """A console whose reader may go away, as `head` does: the command still writes its files.

    Attributes
    ----------
    closed : bool
        Of the class: whether that has happened.
    """

    closed = False

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        ResultConsole.closed = True
        discard_output(self.file)


def discard_output(file: IO[str]) -> None:
    """Let a standard stream write to nowhere."""
    # What is no real file, as in tests, has no reader that could go away.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def output_console() -> Console:
    """Return the console of results."""
    return ResultConsole(highlight=False)


def error_console() -> Console:
    """Return the console of progress, warnings and errors."""
    return ResultConsole(stderr=True, highlight=False)


def progress_bar() -> Progress:
    """Return a progress bar on stderr that is gone when it is done, and not there in a log file."""
    console = error_console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def show_progress(what: str, bar: Progress | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar for a block.

    Gives the function that evaluations call with (steps done, steps in all, what runs next). It
    ends the block where Ctrl-C has been pressed, and lost.
    """
    with bar or progress_bar() as shown:
        task = shown.add_task(what, total=None)

        def step(done: int, total: int, what: str) -> None:
            check_interrupt()
            shown.update(task, completed=done, total=total, description=what)

        yield step


def say_written(path: Path) -> None:
    """Say that a file was written."""
    error_console().print(f"wrote {path}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show each warning once, in one line, and keep the libraries' own noise off for a block."""
    # Python's own filter would drop some and repeat others: which messages repeat is decided here.
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, UserWarning) and text not in shown:
            shown.add(text)
            error_console().print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        _silence_transformers()
        yield


def _silence_transformers() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers.utils import logging
    except ImportError:
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
