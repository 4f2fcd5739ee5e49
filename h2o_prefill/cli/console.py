"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.table import Table

_ANY_WIDTH = 10_000


def output_console() -> Console:
    """Return the console of results."""
    return Console(highlight=False)


def print_wide(title: str, table: Table) -> None:
    """Print a table as a result, over the width of the terminal rather than with cut numbers."""
    console = output_console()
    unlimited = console.options.update(width=_ANY_WIDTH)
    console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(title, table, sep="\n", markup=False)


def error_console() -> Console:
    """Return the console of progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


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

    Gives the function that evaluations call with (steps done, steps in all, what runs next).
    """
    with bar or progress_bar() as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total, what: shown.update(
            task, completed=done, total=total, description=what
        )


def say_written(path: Path) -> None:
    """Say that a file was written."""
    error_console().print(f"wrote {path}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show each warning once, in one line, and keep the libraries' own noise off for a block."""
    # Python's own filter would drop some and repeat others: what is said twice is decided here.
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
