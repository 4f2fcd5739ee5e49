"""Files that commands write: refused before the work if they could not be written after it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from h2o_prefill.cli.console import say_written
from h2o_prefill.eval import Corpus
from h2o_prefill.eval.atomic_write import check_folder, check_writable
from h2o_prefill.eval.plotting import PLOT_SUFFIXES
from h2o_prefill.eval.report import format_json, write_json

# As a file's name: standard output.
STDOUT = "-"


@contextlib.contextmanager
def json_output(path: Path | None) -> Iterator[Callable[[Callable[[], dict[str, Any]]], None]]:
    """Give the function that writes the report of a command, for the block that makes it.

    It takes what makes the report, and calls it only if there is somewhere to write it. With "-"
    for the path the report goes to stdout, and all else that the block prints to stderr.

    Parameters
    ----------
    path : Path, optional
        What --json names; without it the function does nothing.

    Raises
    ------
    ValueError
        If the file could not be written.
    """
    if path is None:
        yield lambda make_report: None
    elif str(path) == STDOUT:
        stdout = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda make_report: print(
                format_json(make_report()), end="", file=stdout, flush=True
            )
    else:
        check_output_file(path, "--json")

        def save(make_report: Callable[[], dict[str, Any]]) -> None:
            write_json(make_report(), path)
            say_written(path)

        yield save


def plot_output(path: Path | None) -> Callable[[Callable[..., Any], Any, str], None]:
    """Return the function that draws the figure of a command: it takes what draws, what, a title.

    Parameters
    ----------
    path : Path, optional
        What --plot names: a file for figures. Without it the function draws nothing.

    Raises
    ------
    ValueError
        As `check_output_file` does.
    ImportError
        If matplotlib is missing.
    """
    if path is None:
        return lambda draw, result, title: None
    check_output_file(path, "--plot", PLOT_SUFFIXES)
    _check_matplotlib("--plot needs")

    def save(draw: Callable[..., Any], result: Any, title: str) -> None:
        draw(result, path, title.replace("\n", ", "))
        say_written(path)

    return save


def text_origin(model: str, dtype: str, corpus: Corpus, **more: Any) -> dict[str, Any]:
    """Return what a report says of where it comes from: the model, the text, and more."""
    text = {"dataset": corpus.name, "text_source": corpus.source}
    return {"model": model, "dtype": dtype, **text, **more}


def check_output_file(path: Path, option: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written.

    Raises
    ------
    ValueError
        If the folder is not there, the path is a folder, it may not be written, or its suffix is
        not one of `suffixes`.
    """
    target = path.expanduser()
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(f"{option} must be a file in a folder that exists, got {str(path)!r}")
    with _refused(option):
        check_writable(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must end in one of {suffixes}, got {str(path)!r}")


def check_output_folder(path: Path | None, names: Iterable[str], figures: bool = True) -> None:
    """Refuse a folder whose files could not be written, and figures without matplotlib.

    Parameters
    ----------
    path : Path, optional
        What --output names; it need not be there.
    names : iterable of str
        The files.
    figures : bool
        Whether figures are among them.

    Raises
    ------
    ValueError
        If the path is a file, or could not be made or written to.
    ImportError
        If matplotlib is missing.
    """
    if path is None:
        return
    folder = path.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output must be a folder, got the file {str(path)!r}")
    with _refused("--output"):
        check_folder(folder)
        for name in names:
            if (folder / name).exists():
                check_writable(folder / name)
    if figures:
        _check_matplotlib("figures need")


def _check_matplotlib(what: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{what} matplotlib: pip install 'h2o_prefill[eval]'")


@contextlib.contextmanager
def _refused(option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {error.strerror}") from error
