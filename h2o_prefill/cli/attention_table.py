"""The table of errors of sparse attention that `h2o-prefill visualize` ends with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from h2o_prefill.cli.result_table import new_table

if TYPE_CHECKING:
    from h2o_prefill.eval import AttentionMeasures


def attention_table(measures: AttentionMeasures) -> Table:
    """Return the errors against dense attention, a chunk a row, and of the whole prompt."""
    values = measures.to_dict()
    # Narrow, and with headings of two lines, to fit 80 columns.
    table = new_table()
    for name in (
        "chunk",
        "relative L1\nerror, mean",
        "worst head\n(layer.head)",
        "dense mass\nseen, mean",
        "worst head\n(layer.head)",
        "sets, Jaccard\nto the last",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in values["by_chunk"]:
        table.add_row(str(row["chunk"]), *_cells(row))
    table.add_section()
    table.add_row("all", *_cells(values["summary"]), style="bold")
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _percent(row["l1_error_mean"]),
        _worst(row["l1_error_worst"]),
        _percent(row["mass_recall_mean"]),
        _worst(row["mass_recall_worst"]),
        "-" if _is_absent(row["jaccard_mean"]) else f"{row['jaccard_mean']:.2f}",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _worst(head: dict[str, Any]) -> str:
    return f"{_percent(head['value'])} ({head['layer']}.{head['head']})"


def _is_absent(value: float | None) -> bool:
    return value is None or math.isnan(value)
