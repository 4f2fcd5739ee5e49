"""The table that `h2o-prefill ablate` ends with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from h2o_prefill.cli.result_table import new_table
from h2o_prefill.eval.ablation_grid import format_value

if TYPE_CHECKING:
    import pandas as pd

_MEASURES = ("dense", "sparse", "difference", "KL", "same\ntop-1", "flops")


def ablation_table(frame: pd.DataFrame, varied: Sequence[str]) -> Table:
    """Return one row a cell: what tells it from the others, and what it costs.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows as `run_ablation` returns them.
    varied : sequence of str
        Columns of which the grid had more than one value.
    """
    names = [*(["dataset"] if frame["dataset"].nunique() > 1 else []), *varied]
    table = new_table()
    with_recall = bool(frame["recalled_keys"].notna().any())
    measures = (*_MEASURES, *(["recalled\nkeys"] if with_recall else []))
    for name in (*(name.replace("_", "\n") for name in names), *measures):
        table.add_column(name, justify="right", no_wrap=True)
    for row in frame.astype(object).where(frame.notna(), None).to_dict(orient="records"):
        error = row["stderr_percent"]
        table.add_row(
            *(format_value(row[name]) for name in names),
            f"{row['dense_ppl']:.3f}",
            f"{row['sparse_ppl']:.3f}",
            f"{row['delta_percent']:+.2f} %{_error(error)}",
            f"{row['kl_mean']:.4f}",
            f"{100 * row['top1_agreement']:.1f} %",
            f"1/{row['attention_flops_ratio']:.2f}",
            *([_count(row["recalled_keys"])] if with_recall else []),
        )
    return table


def _error(percent: float | None) -> str:
    return "" if percent is None or math.isnan(percent) else f" ± {percent:.2f}"


def _count(keys: float | None) -> str:
    return "-" if keys is None else f"{keys:.0f}"
