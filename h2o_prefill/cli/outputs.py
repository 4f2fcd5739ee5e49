"""Files that commands write, checked before the work begins."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from h2o_prefill.cli.console import say_written
from h2o_prefill.eval.report import format_json, write_json
from h2o_prefill.generation import Corpus


@contextlib.contextmanager
def json_output(path: Path | None) -> Iterator[Callable[[Callable[[], dict[str, Any]]], None]]:
    """Yield the function that writes the report of a command, for the block that makes it.

    It takes the function that makes the report, which runs only if --json names a file. With "-"
    the report goes to stdout, and everything else that the block prints to stderr.
    """
    if path is None:
        yield lambda make_report: None
    elif str(path) == "-":
        stdout = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda make: print(format_json(make()), end="", file=stdout, flush=True)
    else:
        check_output_file(path, "--json")

        def save(make_report: Callable[[], dict[str, Any]]) -> None:
            write_json(make_report(), path)
            say_written(path)

        yield save


def plot_output(path: Path | None) -> Callable[[Callable[..., Any], Any, str], None]:
    """Return the function that draws the figure of a command, from a plotter, data and title."""
    if path is None:
        return lambda draw, result, title: None
    from h2o_prefill.eval.plots import SUFFIXES

    check_output_file(path, "--plot", SUFFIXES)

    def save(draw: Callable[..., Any], result: Any, title: str) -> None:
        draw(result, path, title.replace("\n", ", "))
        say_written(path)

    return save


def text_origin(model: str, dtype: str, corpus: Corpus, **more: Any) -> dict[str, Any]:
    """Return the part of a report that names the model, its dtype and the text."""
    text = {"dataset": corpus.name, "text_source": corpus.source}
    return {"model": model, "dtype": dtype, **text, **more}


def check_output_file(path: Path, option: str, suffixes: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a file that could not be written, or has none of the suffixes."""
    target = path.expanduser()
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(f"{option} must be a file in a folder that exists, got {str(path)!r}")
    _check_writable(target, option)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must end in one of {suffixes}, got {str(path)!r}")


def check_output_folder(path: Path | None, names: Iterable[str], option: str = "--output") -> None:
    """Raise ValueError if files could not be written into a folder, which may be new."""
    if path is None:
        return
    folder = path.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} must be a folder, got the file {str(path)!r}")
    while not folder.exists():
        folder = folder.absolute().parent
    for name in ("new", *names):
        _check_writable(folder / name, option)


def _check_writable(path: Path, option: str) -> None:
    try:
        if path.is_file() or path.is_dir():
            path.open("ab").close()
        if path.is_file() or not path.exists():
            # Making a file is the only answer that holds for every user and file system.
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except OSError as error:
        raise ValueError(f"{option}: cannot write {str(path)!r}: {error.strerror}") from error
