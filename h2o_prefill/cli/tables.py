"""The tables of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from h2o_prefill.eval.ablation_table import presets, short_value, varied_settings
from h2o_prefill.eval.scores import format_change
from h2o_prefill.generation.runs import DENSE

if TYPE_CHECKING:
    import pandas as pd

    from h2o_prefill.eval.attention import AttentionMeasures
    from h2o_prefill.eval.perplexity import PerplexityResult
    from h2o_prefill.eval.retrieval import RetrievalResult


def new_table(*headings: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table with these columns, all on the right but the first and `left`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for index, heading in enumerate(headings):
        side: Any = "right" if index and heading not in left else "left"
        table.add_column(heading, justify=side, no_wrap=True)
    return table


def print_result(title: str, table: Table) -> None:
    """Print a table as a result; no cell is cut off: a narrow terminal folds the lines."""
    if title:
        print(title)
    console = Console(highlight=False, markup=False)
    whole = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(table, options=whole).maximum)
    console.print(table)


def perplexity_table(result: PerplexityResult) -> Table:
    """Return perplexity and other measures, dense and sparse, one per row."""
    dense, sparse = result.dense, result.sparse
    table = new_table("", "dense", "sparse", "difference")
    difference = format_change(result.delta_percent, result.stderr_percent)
    table.add_row("perplexity", f"{dense.ppl:.3f}", f"{sparse.ppl:.3f}", difference, style="bold")
    if len(dense.ppl_by_window) > 1:
        table.add_row("  worst window", "", "", format_change(result.worst_percent))
    pairs = zip(dense.ppl_by_chunk, sparse.ppl_by_chunk, strict=True)
    for chunk, (before, after) in enumerate(pairs):
        change = format_change(100 * (after / before - 1))
        table.add_row(f"  chunk {chunk}", f"{before:.3f}", f"{after:.3f}", change)
    table.add_row("mean KL(dense || sparse)", "", "", f"{result.kl_mean:.4f} nats")
    table.add_row("same most likely token", "", "", f"{100 * result.top1_agreement:.1f} %")
    faster = f"{dense.seconds / sparse.seconds:.2f}x as fast"
    table.add_row("seconds of prefill", f"{dense.seconds:.1f}", f"{sparse.seconds:.1f}", faster)
    if result.recalled_keys is not None:
        table.add_row("recalled keys of a row", "", f"{result.recalled_keys:.0f}", "")
    if result.widening is not None:
        table.add_row("adaptive budget, mean factor", "", f"{result.widening:.2f}x", "")
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


def throughput_table(frame: pd.DataFrame) -> Table:
    """Return seconds, and bytes beside the weights, one prompt length per row."""
    # Headings of two lines fit 80 columns.
    columns = {
        "tokens": "{seq_length:.0f}",
        "dense\nseconds": "{dense_seconds:.3f}",
        "sparse\nseconds": "{sparse_seconds:.3f}",
        "speed-up\n(range)": "{speedup:.2f} ({speedup_min:.2f}-{speedup_max:.2f})",
        "attention\nflops ratio": "{attention_flops_ratio:.2f}",
        "dense\nMB": "{dense_megabytes:.1f}",
        "sparse\nMB": "{sparse_megabytes:.1f}",
    }
    table = new_table(*columns)
    sizes = {f"{name}_megabytes": frame[f"{name}_peak_bytes"] / 1e6 for name in ("dense", "sparse")}
    for row in frame.assign(**sizes).to_dict(orient="records"):
        table.add_row(*(form.format_map(row) for form in columns.values()))
    return table


def retrieval_table(result: RetrievalResult) -> Table:
    """Return accuracy with 95 % intervals, and log-probability of the answer with its error."""
    headings = ("accuracy %\n(95 %)", "kept of\nsolved", "log-prob,\nchange")
    table = new_table("task", "tokens", "prefill", *headings, left=("prefill",))
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


def info_table(sections: dict[str, dict[str, Any]]) -> str:
    """Return names and values, section by section."""
    lines = []
    for section, rows in sections.items():
        lines += [section, *(f"  {name}: {_text(value)}" for name, value in rows.items())]
    return "\n".join(lines)


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
