"""What a benchmark leaves behind: a JSON file that grows row by row, and one table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from common.plan import Plan
from common.timing import Ratio, Timings
from h2o_prefill.cli.console import error_console
from h2o_prefill.eval.environment import environment
from h2o_prefill.eval.report import write_json

Row = dict[str, Any]

# What columns begin with: those of a `Case`, and those of a whole model run in several ways. A
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


class Report:
    """The result of one benchmark. Leaving its `with` prints it as a table."""

    def __init__(self, plan: Plan, title: str, columns: Mapping[str, str], **options: Any) -> None:
        self.rows: list[Row] = []
        self._plan = plan
        self._title = title
        self._columns = dict(columns)
        self._head: Row = {
            "benchmark": plan.name,
            "title": title,
            "quick": plan.quick,
            "seconds_per_row": plan.seconds,
            "options": options,
            "load_average": os.getloadavg(),
            "environment": environment(),
        }

    def add(self, **row: Any) -> Row:
        """Keep a row, and write the file: what is measured so far survives an interrupt."""
        self.rows.append(row)
        return self.extend(row)

    def extend(self, row: Row, **fields: Any) -> Row:
        """Give a row that is kept more fields, and write the file."""
        row |= fields
        if self._plan.json is not None:
            write_json({**self._head, "rows": self.rows}, self._plan.json)
        self.note(", ".join(f"{header} {text}" for header, text in self.cells(row).items()))
        return row

    def note(self, text: str) -> None:
        """Say something about the run, on stderr."""
        error_console().print(f"{self._plan.name}: {text}", markup=False, soft_wrap=True)

    def cells(self, row: Row) -> dict[str, str]:
        """Return the texts of the columns that a row fills."""
        texts = {header: _cell(form, row) for header, form in self._columns.items()}
        return {header: text for header, text in texts.items() if text is not None}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.rows:
            return
        # A file has room for the whole table.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        facts = self._head["environment"]
        console.print(
            f"{self._title}\n"
            f"{facts['cpu']}, kernels {facts['library']['cpu_isa_used']}, torch {facts['torch']}"
            + (", quick: the figures mean nothing" if self._plan.quick else ""),
            markup=False,
        )
        for table in self._tables():
            console.print(table)
        if self._plan.json is not None:
            self.note(f"wrote {self._plan.json}")

    def _tables(self) -> list[Table]:
        """Return a table for each set of columns that rows fill."""
        tables: dict[tuple[str, ...], Table] = {}
        for row in self.rows:
            cells = self.cells(row)
            headers = tuple(cells)
            if headers not in tables:
                tables[headers] = Table(box=box.SIMPLE_HEAD)
                for header in headers:
                    tables[headers].add_column(header, justify="right", no_wrap=True)
            tables[headers].add_row(*cells.values())
        return list(tables.values())


def ratio_fields(name: str, ratio: Ratio) -> Row:
    """Return a ratio as the fields `name`, `name_q1`, `name_q3`."""
    return {name: ratio.value, f"{name}_q1": ratio.q1, f"{name}_q3": ratio.q3}


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
        **ratio_fields("speedup", timings.ratio(baseline, ours)),
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
