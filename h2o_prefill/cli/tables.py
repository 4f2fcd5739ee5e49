"""The tables that commands end with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from h2o_prefill.cli.result_table import new_table
from h2o_prefill.config import format_value

if TYPE_CHECKING:
    import pandas as pd

    from h2o_prefill.eval.answers import AnswersResult
    from h2o_prefill.eval.attention.measures import AttentionMeasures
    from h2o_prefill.eval.attention_flops import AttentionFlops
    from h2o_prefill.eval.calibration.result import LayerCalibration
    from h2o_prefill.eval.compatibility.sweep import Finding
    from h2o_prefill.eval.perplexity.result import PerplexityResult
    from h2o_prefill.eval.retrieval.result import RetrievalResult

_ABLATION_MEASURES = ("dense", "sparse", "difference", "KL", "same\ntop-1", "flops")


def perplexity_table(result: PerplexityResult) -> Table:
    """Return dense, sparse and their difference, one measure a row."""
    dense, sparse = result.dense, result.sparse
    table = new_table()
    table.add_column("")
    for name in ("dense", "sparse", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    difference = _signed(result.delta_percent) + _error(result.stderr_percent)
    table.add_row("perplexity", f"{dense.ppl:.3f}", f"{sparse.ppl:.3f}", difference, style="bold")
    for chunk, (before, after) in enumerate(
        zip(dense.ppl_by_chunk, sparse.ppl_by_chunk, strict=True)
    ):
        if before is not None and after is not None:
            change = _signed(100 * (after / before - 1))
            table.add_row(f"  chunk {chunk}", f"{before:.3f}", f"{after:.3f}", change)
    table.add_row("mean KL(dense || sparse)", "", "", f"{result.kl_mean:.4f} nats")
    table.add_row("same most likely token", "", "", f"{100 * result.top1_agreement:.1f} %")
    table.add_row(
        "seconds of prefill",
        f"{dense.seconds:.1f}",
        f"{sparse.seconds:.1f}",
        f"{dense.seconds / sparse.seconds:.2f}x as fast",
    )
    if result.recalled_keys is not None:
        table.add_row("recalled keys of a row", "", f"{result.recalled_keys:.0f}", "")
    table.add_row(
        "attention flops",
        "1",
        f"{1 / result.attention_flops_ratio:.2f}",
        f"{result.attention_flops_ratio:.2f}x fewer",
    )
    return table


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
    measures = (*_ABLATION_MEASURES, *(["recalled\nkeys"] if with_recall else []))
    for name in (*(name.replace("_", "\n") for name in names), *measures):
        table.add_column(name, justify="right", no_wrap=True)
    for row in frame.astype(object).where(frame.notna(), None).to_dict(orient="records"):
        table.add_row(
            *(format_value(row[name]) for name in names),
            f"{row['dense_ppl']:.3f}",
            f"{row['sparse_ppl']:.3f}",
            _signed(row["delta_percent"]) + _error(row["stderr_percent"]),
            f"{row['kl_mean']:.4f}",
            f"{100 * row['top1_agreement']:.1f} %",
            f"1/{row['attention_flops_ratio']:.2f}",
            *([_count(row["recalled_keys"])] if with_recall else []),
        )
    return table


def calibration_table(result: LayerCalibration, chosen: tuple[int, ...], keep: str) -> Table:
    """Return what KL each layer leaves when it is dense, the best first, and that of those chosen.

    `keep` says what became of them.
    """
    table = new_table()
    table.add_column("")
    for name in ("mean KL(dense || sparse)", "change", "attention flops"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(name: str, kl: float, flops: str = "", style: str | None = None) -> None:
        change = _signed(100 * (kl / result.kl_before - 1)) if result.kl_before else ""
        table.add_row(name, f"{kl:.4f} nats", change, flops, style=style)

    def share(flops: AttentionFlops) -> str:
        return f"{100 / flops.ratio:.1f} %"

    add("the settings", result.kl_before, share(result.flops_before))
    for layer in result.ranking:
        style = "bold" if layer in chosen else None
        add(f"  layer {layer} dense", result.kl_by_layer[layer], style=style)
    names = ", ".join(map(str, chosen))
    add(f"layers {names} {keep}", result.kl_after, share(result.flops_after), style="bold")
    return table


def throughput_table(frame: pd.DataFrame) -> Table:
    """Return seconds and tokens per second, one prompt length a row."""
    # Narrow, and with headings of two lines, to fit 80 columns.
    table = new_table()
    with_recall = bool(frame["recalled_keys"].notna().any())
    for name in (
        "tokens",
        "dense\nseconds",
        "sparse\nseconds",
        "dense\ntokens/s",
        "sparse\ntokens/s",
        "speed-up\n(range)",
        "attention\nflops ratio",
        *(["recalled\nkeys"] if with_recall else []),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in frame.to_dict(orient="records"):
        table.add_row(
            f"{row['seq_length']:.0f}",
            f"{row['dense_seconds']:.3f}",
            f"{row['sparse_seconds']:.3f}",
            f"{row['dense_tokens_per_second']:.0f}",
            f"{row['sparse_tokens_per_second']:.0f}",
            f"{row['speedup']:.2f} ({row['speedup_min']:.2f}-{row['speedup_max']:.2f})",
            f"{row['attention_flops_ratio']:.2f}",
            *([f"{row['recalled_keys']:.0f}"] if with_recall else []),
        )
    return table


def retrieval_table(result: RetrievalResult) -> Table:
    """Return the accuracy of each variant, task by task and length by length, with 95 % intervals.

    Kept is what a variant solves of the prompts that the dense run solves.
    """
    # Narrow, and with headings of two lines, to fit 80 columns.
    table = new_table()
    table.add_column("task", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("prefill", overflow="fold")
    table.add_column("accuracy %\n(95 %)", justify="right", no_wrap=True)
    table.add_column("kept of\nsolved", justify="right", no_wrap=True)
    table.add_column("kept %\n(95 %)", justify="right", no_wrap=True)
    for row in result.summary:
        first = row.variant == result.summary[0].variant
        if first:
            table.add_section()
        table.add_row(
            row.task if first else "",
            str(row.length) if first else "",
            row.variant,
            _with_interval(row.accuracy, row.accuracy_interval),
            _of(row.kept, row.dense_solved),
            _with_interval(row.kept, row.kept_interval),
        )
    return table


def answers_table(result: AnswersResult) -> Table:
    """Return how many answers of each variant equal dense, and where the others part from it."""
    table = new_table()
    table.add_column("prefill", overflow="fold")
    table.add_column("equal to\ndense", justify="right", no_wrap=True)
    table.add_column("others part\nat token", overflow="fold")
    table.add_column("median\ngap", justify="right", no_wrap=True)
    for name in result.variants:
        gaps = result.gaps(name)
        table.add_row(
            name,
            f"{result.equal(name)}/{len(result.prompts)}",
            " ".join(map(str, result.parting_tokens(name))) or "-",
            f"{gaps[len(gaps) // 2]:.2f}" if gaps else "-",
        )
    return table


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
        table.add_row(str(row["chunk"]), *_error_cells(row))
    table.add_section()
    table.add_row("all", *_error_cells(values["summary"]), style="bold")
    return table


def models_table(findings: Sequence[Finding]) -> Table:
    """Return one class a row: how many of its attention layers are sparse, and why not all."""
    from h2o_prefill.eval.compatibility.page import difference_text, layers_text, reason_text

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


def info_table(sections: dict[str, dict[str, Any]]) -> Table:
    """Return names and values, section by section."""
    table = new_table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section, rows in sections.items():
        table.add_section()
        table.add_row(section, "")
        for name, value in rows.items():
            table.add_row(f"  {name}", _text(value))
    return table


def _signed(percent: float) -> str:
    """Return a signed percentage, without a sign if it rounds to zero from below."""
    return f"{round(percent, 2) + 0.0:+.2f} %"


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _error(percent: float | None) -> str:
    return "" if _is_missing(percent) else f" ± {percent:.2f}"


def _count(keys: float | None) -> str:
    return "-" if keys is None else f"{keys:.0f}"


def _error_cells(row: dict[str, Any]) -> list[str]:
    return [
        _share(row["l1_error_mean"]),
        _worst(row["l1_error_worst"]),
        _share(row["mass_recall_mean"]),
        _worst(row["mass_recall_worst"]),
        "-" if _is_missing(row["jaccard_mean"]) else f"{row['jaccard_mean']:.2f}",
    ]


def _worst(head: dict[str, Any]) -> str:
    return f"{_share(head['value'])} ({head['layer']}.{head['head']})"


def _is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _of(share: float, count: int) -> str:
    return f"{share * count:.0f}/{count}" if count else "-"


def _with_interval(share: float, interval: tuple[float, float]) -> str:
    if math.isnan(share):
        return "-"
    low, high = interval
    return f"{100 * share:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)
