"""Tables as results: one row per line if that fits, else one value per line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from h2o_prefill.cli.console import output_console

# Columns that may fold are not made narrower than this.
_LEAST_FOLDED = 12
_ANY_WIDTH = 10_000


def new_table(*headings: str, folding: Sequence[str] = (), show_header: bool = True) -> Table:
    """Return an empty table with these columns, all on the right but the first and `folding`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_header=show_header)
    for index, heading in enumerate(headings):
        side: Any = "right" if index and heading not in folding else "left"
        table.add_column(heading, justify=side, no_wrap=heading not in folding, overflow="fold")
    return table


def print_result(title: str, table: Table) -> None:
    """Print a table as a result; no cell is cut off, however narrow the terminal is."""
    console = output_console()
    narrowest = _narrowest(table, console)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = max(console.width, narrowest)
    if title:
        console.print(title, markup=False)
    console.print(table if narrowest <= console.width else _stacked(table))


def _narrowest(table: Table, console: Console) -> int:
    """Return the least width in which no cell of a table is cut off."""
    unlimited = console.options.update(width=_ANY_WIDTH)
    whole = console.measure(table, options=unlimited).maximum
    for column in table.columns:
        if not column.no_wrap:
            texts = "\n".join(map(str, (column.header, *column.cells)))
            whole -= max(0, max(map(cell_len, texts.split("\n"))) - _LEAST_FOLDED)
    return whole


def _stacked(table: Table) -> Text:
    """Return one cell per line, after the heading of its column, row after row."""
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    lines = []
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        named = zip(headings, map(str, cells), strict=True)
        pairs = [f"{name}  {cell}" if name else cell for name, cell in named if cell]
        lines += ["\n    ".join(pairs)]
    return Text("\n".join(lines), overflow="fold")
