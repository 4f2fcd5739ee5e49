"""Console output: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

# Of warnings, errors and what was written: text as it is, however long a line.
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr for a block; yield the function that evaluations report to."""
    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # A step may take minutes: estimates are of the whole run, not of the last 30 seconds.
        speed_estimate_period=float("inf"),
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total, what: shown.update(
            task, completed=done, total=total, description=what
        )


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show each warning once, in one line, and silence the libraries' own messages for a block."""
    shown: set[str] = set()  # Python's own filter would drop some warnings and repeat others

    def show(message: Warning | str, category: type[Warning], *rest: object) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, UserWarning) and text not in shown:
            shown.add(text)
            stderr.print(f"warning: {text}", style="yellow")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with contextlib.suppress(ImportError):
            from transformers.utils import logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
        yield
