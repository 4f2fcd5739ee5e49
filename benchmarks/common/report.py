"""What a benchmark leaves: a JSON file that grows row by row, and one table at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from common.benchmark import Plan, Row
from h2o_prefill.eval.report import build_report, write_json
from h2o_prefill.eval.timing.compare import Timings

# What columns begin with: those of a `Case`, and those of a whole model run in several variants. A
# table leaves out what its rows do not have.
CASE_COLUMNS = {
    "model": "{model}",
    "D": "{head_dim}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "device": "{device}",
}
MODEL_COLUMNS = {
    "N": "{length}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "variant": "{variant}",
}


def ratio_column(name: str, form: str = ".2f", unit: str = "x") -> str:
    """Return the column of a ratio and its quartiles."""
    return f"{{{name}:{form}}}{unit} ({{{name}_q1:{form}}} to {{{name}_q3:{form}}})"


class Report:
    """The result of one benchmark. Leaving its `with` prints it as a table.

    Its file is that of an evaluation, `build_report`: the options as its config, the rows as its
    results.
    """

    def __init__(self, plan: Plan, title: str, columns: Mapping[str, str], **options: Any) -> None:
        self.rows: list[Row] = []
        self._plan = plan
        self._columns = columns
        self._values = build_report(
            options,
            benchmark=plan.name,
            title=title,
            quick=plan.quick,
            seconds_per_row=plan.seconds,
            load_average=os.getloadavg(),
            results=self.rows,
        )

    def add(self, **row: Any) -> Row:
        """Keep a row, and write the file: what is measured so far survives an interrupt."""
        self.rows.append(row)
        return self.extend(row)

    def extend(self, row: Row, **fields: Any) -> Row:
        """Give a row that is kept more fields, and write the file."""
        row |= fields
        if self._plan.json is not None:
            write_json(self._values, self._plan.json)
        self.note(", ".join(f"{header} {text}" for header, text in self._cells(row).items()))
        return row

    def note(self, text: str) -> None:
        """Say something about the run, on stderr."""
        typer.echo(f"{self._plan.name}: {text}", err=True)

    def _cells(self, row: Row) -> dict[str, str]:
        """Return the texts of the columns that a row fills."""
        texts = {header: _cell(form, row) for header, form in self._columns.items()}
        return {header: text for header, text in texts.items() if text is not None}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.rows:
            return
        facts = self._values["environment"]
        machine = f"{facts['cpu']}, kernels {facts['library']['cpu_isa_used']}"
        quick = ", quick: the figures mean nothing" if self._plan.quick else ""
        typer.echo(f"{self._values['title']}\n{machine}, torch {facts['torch']}{quick}")
        # A file has room for the whole table.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        # A table for each set of columns that rows fill.
        tables: dict[tuple[str, ...], Table] = {}
        for cells in map(self._cells, self.rows):
            headers = tuple(cells)
            if headers not in tables:
                tables[headers] = Table(box=box.SIMPLE_HEAD)
                for header in headers:
                    tables[headers].add_column(header, justify="right", no_wrap=True)
            tables[headers].add_row(*cells.values())
        for table in tables.values():
            console.print(table)
        if self._plan.json is not None:
            self.note(f"wrote {self._plan.json}")


def read_report(path: Path) -> Row:
    """Return what a report wrote; older files call config and results options and rows."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return {"config": values.get("options"), "results": values.get("rows"), **values}


def speedup_fields(timings: Timings, ours: str, baseline: str, unit: str = "milliseconds") -> Row:
    """Return the times of a call and its baseline, the rounds, and how many times as fast it is.

    The fields are `unit` (milliseconds or microseconds), that with the baseline's name before it,
    `rounds`, and `speedup` with its quartiles.
    """
    scale = {"milliseconds": 1e3, "microseconds": 1e6}[unit]
    return {
        unit: scale * timings.median(ours),
        f"{baseline}_{unit}": scale * timings.median(baseline),
        "rounds": timings.rounds,
        **timings.ratio(baseline, ours).fields("speedup"),
    }


def rate_fields(timings: Timings, name: str, tokens: int) -> Row:
    """Return the name of a call that takes so many tokens, its time, their rate and the rounds."""
    seconds = timings.median(name)
    return {
        "variant": name,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "rounds": timings.rounds,
    }


def decoding_fields(timings: Timings, name: str, steps: int) -> Row:
    """Return the time of one of the tokens that a call decodes, their rate and the rounds."""
    seconds_a_token = timings.median(name) / steps
    return {
        "milliseconds": 1e3 * seconds_a_token,
        "tokens_per_second": 1 / seconds_a_token,
        "rounds": timings.rounds,
    }


def _cell(form: str, row: Row) -> str | None:
    try:
        return form.format(**row)
    except (KeyError, TypeError):  # a field that this row does not have, or None
        return None
