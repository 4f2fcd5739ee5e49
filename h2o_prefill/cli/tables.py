"""The tables that commands end with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from h2o_prefill.cli.result_table import new_table

if TYPE_CHECKING:
    from h2o_prefill.eval.attention_flops import AttentionFlops
    from h2o_prefill.eval.calibration.calibrate import LayerCalibration
    from h2o_prefill.eval.perplexity.result import PerplexityResult


def perplexity_table(result: PerplexityResult) -> Table:
    """Return dense, sparse and their difference, one measure a row."""
    dense, sparse = result.dense, result.sparse
    table = new_table()
    table.add_column("")
    for name in ("dense", "sparse", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    difference = _percent(result.delta_percent)
    if not math.isnan(result.stderr_percent):
        difference += f" ± {result.stderr_percent:.2f}"
    table.add_row("perplexity", f"{dense.ppl:.3f}", f"{sparse.ppl:.3f}", difference, style="bold")
    for chunk, (before, after) in enumerate(
        zip(dense.ppl_by_chunk, sparse.ppl_by_chunk, strict=True)
    ):
        if before is not None and after is not None:
            change = _percent(100 * (after / before - 1))
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


def calibration_table(result: LayerCalibration, chosen: tuple[int, ...], keep: str) -> Table:
    """Return what KL each layer leaves when it is dense, the best first, and that of those chosen.

    `keep` says what became of them.
    """
    table = new_table()
    table.add_column("")
    for name in ("mean KL(dense || sparse)", "change", "attention flops"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(name: str, kl: float, flops: str = "", style: str | None = None) -> None:
        change = _percent(100 * (kl / result.kl_before - 1)) if result.kl_before else ""
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


def _percent(value: float) -> str:
    """Return a signed percentage, without a sign if it rounds to zero from below."""
    return f"{round(value, 2) + 0.0:+.2f} %"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)
