"""Draws what each program's modes lose beside the time that they take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from common.plot_parts import Row, make_figure, save_figure

# Of the programs, in the order of the rows; told apart by people who see colours differently.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
# Of a program's modes, and of one mode as a package or with several batches.
_MARKERS = ["o", "D", "^", "s", "v", "P", "X"]
_FILLS = ["full", "none", "left", "right"]

_LOSS_TICKS = [0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
_SECOND_TICKS = [0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200]


def plot_peers(result: Row, path: Path) -> Path | None:
    """Draw the loss by the seconds of a prefill, a panel for each length.

    Of several numbers of threads the largest is drawn. Returns None, and draws nothing, where no
    row has both a loss and a time.
    """
    rows = [row for row in result["rows"] if "delta_percent" in row and "seconds" in row]
    if not rows:
        return None
    most = max(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == most]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    styles = _styles(rows)
    figure, grid = make_figure(len(lengths))
    columns = min(len(lengths), 3)
    figure.set_size_inches(6.2 * columns, 4.6 * -(-len(lengths) // columns) + 2.2)
    for axes, length in zip(grid, lengths, strict=True):
        chosen = [row for row in rows if row["length"] == length]
        for row in chosen:
            style = styles[row["variant"]]
            point = (row["seconds"], row["delta_percent"])
            axes.plot(*point, linestyle="none", label=_label(row["variant"]), **style)
            if error := row.get("stderr_percent"):
                axes.errorbar(*point, error, color=style["color"], elinewidth=1, capsize=2)
        axes.set_title(f"{length:,} tokens, {most} thread{'s'[: most > 1]}", fontsize=9)
        _use_axes(axes, chosen)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    title = "What prefill loses beside its time: lower left is better"
    return save_figure(figure, title, [result], path)


def _label(variant: str) -> str:
    """Break settings texts, which are long and have no blanks, behind a comma."""
    return re.sub(r"(.{24,44}?,)(?=\S)", r"\1\n", variant)


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    colours = dict(zip(dict.fromkeys(row["program"] for row in rows), _COLOURS, strict=False))
    modes: dict[str, dict[str, int]] = {}
    forms: dict[str, dict[str, int]] = {}
    styles = {}
    for row in rows:
        mode, form, _ = re.split(r"(, package|, batch \d+|)$", row["variant"], maxsplit=1)
        known = modes.setdefault(row["program"], {})
        marker = _MARKERS[known.setdefault(mode, len(known)) % len(_MARKERS)]
        of_mode = forms.setdefault(mode, {})
        styles[row["variant"]] = {
            "color": colours.get(row["program"], "0.45"),
            "marker": marker,
            "fillstyle": _FILLS[of_mode.setdefault(form, len(of_mode)) % len(_FILLS)],
            "markersize": 8,
        }
    return styles


def _use_axes(axes: Axes, rows: list[Row]) -> None:
    seconds = [row["seconds"] for row in rows]
    axes.set_xscale("log")
    axes.set_xlim(min(seconds) / 1.25, max(seconds) * 1.25)
    low, high = axes.get_xlim()
    ticks = [tick for tick in _SECOND_TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("seconds of the prefill")
    # Below 1 % linear: dense modes are at 0, and rounding can be a gain.
    axes.set_yscale("symlog", linthresh=1)
    largest = max(row["delta_percent"] + (row.get("stderr_percent") or 0) for row in rows)
    axes.set_ylim(min(-0.5, *(row["delta_percent"] - 0.5 for row in rows)), 1.6 * max(largest, 2))
    ticks = [tick for tick in _LOSS_TICKS if tick <= axes.get_ylim()[1]]
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("perplexity above the program's dense mode")
