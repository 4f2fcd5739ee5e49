"""The table that `h2o-prefill models` ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from h2o_prefill.cli.result_table import new_table
from h2o_prefill.eval.model_page import difference_text, layers_text, reason_text

if TYPE_CHECKING:
    from h2o_prefill.eval.model_sweep import Finding


def models_table(findings: Sequence[Finding]) -> Table:
    """Return one class a row: how many of its attention layers are sparse, and why not all."""
    table = new_table()
    table.add_column("class", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("sparse / attention\nlayers", justify="right", no_wrap=True)
    table.add_column("largest difference\nfrom stock", justify="right", no_wrap=True)
    table.add_column("why not all", overflow="fold")
    for finding in findings:
        table.add_row(
            finding.name,
            finding.result,
            layers_text(finding),
            difference_text(finding),
            reason_text(finding),
            style="bold red" if finding.wrong else None,
        )
    return table
