"""Files that commands write, checked before the work begins."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from h2o_prefill.cli import tables
from h2o_prefill.cli.console import stderr
from h2o_prefill.eval.report import format_json, output_folder, write_json


@dataclass(frozen=True)
class ReportOptions:
    """Where the report of a command goes."""

    json_file: Path | None = typer.Option(
        None,
        "--json",
        metavar="FILE",
        help="Write the result to this file as JSON. With - it goes to standard output, and tables "
        "and messages go to standard error.",
    )

    def check(self) -> None:
        """Raise ValueError if the file could not be written."""
        if self.json_file is not None and str(self.json_file) != "-":
            check_output_file(self.json_file, "--json")

    def write(self, make_report: Callable[[], dict[str, Any]]) -> None:
        """Write the report, which is made only if --json asks for it."""
        if str(self.json_file) == "-":
            print(format_json(make_report()), end="", flush=True)
        elif self.json_file is not None:
            write_json(make_report(), self.json_file)
            stderr.print(f"wrote {self.json_file}")

    def show(self, title: str, table: Table | str, *lines: object) -> None:
        """Print a table under its title, and lines, to stderr if the report has stdout."""
        with contextlib.redirect_stdout(sys.stderr if str(self.json_file) == "-" else sys.stdout):
            if isinstance(table, str):
                print(title, table, sep="\n" if title else "")
            else:
                tables.print_result(title, table)
            for line in lines:
                print(line)


def check_output_file(path: Path, option: str) -> None:
    """Raise ValueError for a file that could not be written."""
    target = path.expanduser().absolute()
    if target.is_dir() or not (target.parent.is_dir() and os.access(target.parent, os.W_OK)):
        raise ValueError(f"{option} must be a file in a folder to write to, got {str(path)!r}")


def check_output_folder(path: Path, names: Iterable[str], option: str = "--output") -> None:
    """Raise ValueError if files could not be written into a folder, which may be new."""
    folder = output_folder(path, option).absolute()
    if folder.exists():
        for name in names:
            check_output_file(folder / name, option)
        return
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"{option}: cannot write into {str(path)!r}")
