"""What a benchmark leaves: a JSON file that grows row by row, and one table at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from common.benchmark import Plan, Row
from common.compare import Timings
from h2o_prefill.cli.tables import new_table, print_result
from h2o_prefill.eval.report import build_report, write_json

# How the names of fields are shortened in the heads of columns.
_SHORT = {
    "milliseconds": "ms",
    "microseconds": "us",
    "kilobytes": "kB",
    "megabytes": "MB",
    "gigabytes": "GB",
    "percent": "%",
}


class Report:
    """The result of one benchmark. Leaving its `with` prints it as a table.

    Its file has the form of an evaluation's, `build_report`: the options as its config, the rows as
    its results. Columns of the table are the fields of the rows; quartiles follow their ratio.
    """

    def __init__(self, plan: Plan, title: str, **options: Any) -> None:
        self.rows: list[Row] = []
        self._plan = plan
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
        self.note(", ".join(f"{header} {text}" for header, text in _cells(row).items()))
        return row

    def note(self, text: str) -> None:
        """Say something about the run, on stderr."""
        typer.echo(f"{self._plan.name}: {text}", err=True)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.rows:
            return
        facts = self._values["environment"]
        machine = f"{facts['cpu']}, kernels {facts['library']['cpu_isa_used']}"
        quick = ", quick: the figures mean nothing" if self._plan.quick else ""
        typer.echo(f"{self._values['title']}\n{machine}, torch {facts['torch']}{quick}")
        # A table for each set of columns that rows fill.
        tables: dict[tuple[str, ...], Table] = {}
        for cells in map(_cells, self.rows):
            headers = tuple(cells)
            if headers not in tables:
                tables[headers] = new_table(*(header.replace(" ", "\n") for header in headers))
            tables[headers].add_row(*cells.values())
        for table in tables.values():
            print_result("", table)
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


def _cells(row: Row) -> dict[str, str]:
    """Return the texts of the columns that a row fills."""
    cells = {}
    for name, value in row.items():
        if value is None or isinstance(value, (list, dict)) or name.endswith(("_q1", "_q3")):
            continue
        text = _number(value) if isinstance(value, float) else str(value)
        if f"{name}_q1" in row:
            text += " ({} to {})".format(*(_number(row[name + end]) for end in ("_q1", "_q3")))
        cells[" ".join(_SHORT.get(word, word) for word in name.split("_"))] = text
    return cells


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
