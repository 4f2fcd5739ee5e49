"""The tables of results: one row per line if that fits, else one value per line."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from h2o_prefill.eval.ablation_table import presets, short_value, varied_settings
from h2o_prefill.eval.scores import format_change
from h2o_prefill.generation.runs import DENSE

if TYPE_CHECKING:
    import pandas as pd

    from h2o_prefill.eval.attention import AttentionMeasures
    from h2o_prefill.eval.attention_flops import AttentionFlops
    from h2o_prefill.eval.calibration import HeadCalibration
    from h2o_prefill.eval.comparison import Comparison
    from h2o_prefill.eval.perplexity import PerplexityResult
    from h2o_prefill.eval.retrieval import RetrievalResult


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
    console = Console(highlight=False)
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


def comparison_table(result: Comparison) -> Table:
    """Return what is measured, one run per row."""
    headings, *rows = result.table()
    table = new_table(*headings, folding=headings[-1:])
    for row in rows:
        table.add_row(*row)
    return table


def perplexity_table(result: PerplexityResult) -> Table:
    """Return perplexity and other measures, dense and sparse, one per row."""
    dense, sparse = result.dense, result.sparse
    table = new_table("", "dense", "sparse", "difference", folding=("",))
    difference = format_change(result.delta_percent, result.stderr_percent)
    table.add_row("perplexity", f"{dense.ppl:.3f}", f"{sparse.ppl:.3f}", difference, style="bold")
    if len(dense.ppl_by_window) > 1:
        table.add_row("  worst window", "", "", format_change(result.worst_percent))
    pairs = zip(dense.ppl_by_chunk, sparse.ppl_by_chunk, strict=True)
    for chunk, (before, after) in enumerate(pairs):
        if before is not None and after is not None:
            change = format_change(100 * (after / before - 1))
            table.add_row(f"  chunk {chunk}", f"{before:.3f}", f"{after:.3f}", change)
    if (keys := result.key_tokens) is not None:
        ppls = (f"{value:.3f}" for value in (keys.dense_ppl, keys.sparse_ppl))
        change = format_change(keys.delta_percent, keys.stderr_percent)
        table.add_row(f"{keys.count} key tokens (LongPPL)", *ppls, change)
    table.add_row("mean KL(dense || sparse)", "", "", f"{result.kl_mean:.4f} nats")
    table.add_row("same most likely token", "", "", f"{100 * result.top1_agreement:.1f} %")
    faster = f"{dense.seconds / sparse.seconds:.2f}x as fast"
    table.add_row("seconds of prefill", f"{dense.seconds:.1f}", f"{sparse.seconds:.1f}", faster)
    if result.recalled_keys is not None:
        table.add_row("recalled keys of a row", "", f"{result.recalled_keys:.0f}", "")
    if result.widening is not None:
        table.add_row("memory sets widened, mean", "", f"{result.widening:.2f}x", "")
    ratio = result.attention_flops_ratio
    table.add_row("attention flops", "1", f"{1 / ratio:.2f}", f"{ratio:.2f}x fewer")
    return table


def ablation_table(frame: pd.DataFrame) -> Table:
    """Return one row per cell: the columns that distinguish it from the others, and measures."""
    names = ["dataset", "context", "preset"]
    if presets(frame).isna().any():
        names[-1:] = varied_settings(frame)
    names = [name for name in names if frame[name].nunique(dropna=False) > 1]
    measures = ["dense", "sparse", "difference", "KL", "flops", "dense\ns", "sparse\ns"]
    table = new_table(*(name.replace("_", "\n") for name in names), *measures)
    for row in frame.astype(object).where(frame.notna(), None).itertuples():
        table.add_row(
            *(short_value(getattr(row, name)) for name in names),
            *(f"{row.dense_ppl:.3f}", f"{row.sparse_ppl:.3f}"),
            format_change(row.delta_percent, row.stderr_percent),
            *(f"{row.kl_mean:.4f}", f"1/{row.attention_flops_ratio:.2f}"),
            *(f"{row.dense_seconds:.3g}", f"{row.sparse_seconds:.3g}"),
        )
    return table


def calibration_table(result: HeadCalibration) -> Table:
    """Return the error of all heads, and of each that is found, and how larger sets change it."""
    table = new_table("heads", "error\nx 10⁶", "change", "attention\nflops", folding=("heads",))

    def add(
        name: str, error: float, before: float, flops: AttentionFlops | None = None, **row: Any
    ) -> None:
        change = format_change(100 * (error / before - 1)) if before else ""
        share = "" if flops is None else f"{100 / flops.ratio:.1f} %"
        table.add_row(name, f"{1e6 * error:.1f}", change, share, **row)

    before, after = result.error_before, result.error_after
    add("all", before, 0, result.flops_before)
    for layer, head, factor in result.chosen:
        old, new = (result.error(layer, head, size) for size in (1, factor))
        add(f"  {layer}.{head}x{factor}", new, old)
    add(f"all, {len(result.chosen)} wider", after, before, result.flops_after, style="bold")
    return table


def throughput_table(frame: pd.DataFrame) -> Table:
    """Return seconds and tokens per second, one prompt length per row."""
    # Headings of two lines fit 80 columns.
    columns = {
        "tokens": "{seq_length:.0f}",
        "dense\nseconds": "{dense_seconds:.3f}",
        "sparse\nseconds": "{sparse_seconds:.3f}",
        "dense\ntokens/s": "{dense_tokens_per_second:.0f}",
        "sparse\ntokens/s": "{sparse_tokens_per_second:.0f}",
        "speed-up\n(range)": "{speedup:.2f} ({speedup_min:.2f}-{speedup_max:.2f})",
        "attention\nflops ratio": "{attention_flops_ratio:.2f}",
    }
    if frame["recalled_keys"].notna().any():
        columns["recalled\nkeys"] = "{recalled_keys:.0f}"
    table = new_table(*columns)
    for row in frame.to_dict(orient="records"):
        table.add_row(*(form.format_map(row) for form in columns.values()))
    return table


def retrieval_table(result: RetrievalResult) -> Table:
    """Return accuracy with 95 % intervals, and log-probability of the answer with its error."""
    headings = ("accuracy %\n(95 %)", "kept of\nsolved", "log-prob,\nchange")
    table = new_table("task", "tokens", "prefill", *headings, folding=("prefill",))
    row: Any
    for row in result.summary.itertuples():
        first = row.variant == DENSE
        shares = (100 * share for share in (row.accuracy, *row.accuracy_interval))
        change = row.log_prob_change, row.log_prob_stderr
        if first:
            table.add_section()
        table.add_row(
            *((row.task, str(row.length)) if first else ("", "")),
            row.variant,
            "{:.0f} ({:.0f}-{:.0f})".format(*shares),
            _numbers("{:.0f}/{:.0f}", row.kept * row.dense_solved, row.dense_solved),
            f"{row.log_prob:.3f}" if first else _numbers("{:+.3f} ± {:.3f}", *change),
        )
    return table


def attention_table(measures: AttentionMeasures) -> Table:
    """Return the errors against dense attention, one chunk per row, and of the whole prompt."""
    values = measures.to_dict()
    table = new_table(
        "chunk",
        "relative L1\nerror, mean",
        "worst head\n(layer.head)",
        "dense mass\nseen, mean",
        "worst head\n(layer.head)",
        "sets, Jaccard\nto the last",
    )
    for row in values["by_chunk"]:
        table.add_row(str(row["chunk"]), *_error_cells(row))
    table.add_section()
    table.add_row("all", *_error_cells(values["summary"]), style="bold")
    return table


def info_table(sections: dict[str, dict[str, Any]]) -> Table:
    """Return names and values, section by section."""
    table = new_table("", show_header=False)
    table.columns[0].style = "bold"
    table.add_column(overflow="fold")
    for section, rows in sections.items():
        table.add_section()
        table.add_row(section, "")
        for name, value in rows.items():
            table.add_row(f"  {name}", _text(value))
    return table


def _numbers(form: str, *values: float | None) -> str:
    """Return numbers as text, "-" if one is missing."""
    missing = any(value is None or math.isnan(value) for value in values)
    return "-" if missing else form.format(*values)


def _error_cells(row: dict[str, Any]) -> list[str]:
    cells = []
    for name in ("l1_error", "mass_recall"):
        worst = row[f"{name}_worst"]
        cells.append(f"{100 * row[f'{name}_mean']:.2f} %")
        cells.append(f"{100 * worst['value']:.2f} % ({worst['layer']}.{worst['head']})")
    return [*cells, _numbers("{:.2f}", row["jaccard_mean"])]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return "-" if value is None else str(value)
