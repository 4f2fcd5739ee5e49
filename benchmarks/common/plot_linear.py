"""Draws the time and the memory of linear attention, and what the chunk size does to them."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from common.plot_parts import Row, draw_line, make_figure, save_figure, use_length_axis

_LINEAR: dict[str, Any] = {"color": "#D55E00", "marker": "D"}
_SDPA: dict[str, Any] = {"color": "#0072B2", "marker": "o"}
_GRADIENT: dict[str, Any] = {"linestyle": "--"}

# Label, fields of the time and of the memory, style; told apart in print too.
_FORMS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("linear attention", "milliseconds", "temporary_megabytes", _LINEAR),
    ("with its gradient", "both_milliseconds", "both_megabytes", _LINEAR | _GRADIENT),
    ("SDPA", "sdpa_milliseconds", "sdpa_megabytes", _SDPA),
    ("SDPA with its gradient", "sdpa_both_milliseconds", "sdpa_both_megabytes", _SDPA | _GRADIENT),
    (
        "masked square",
        "square_milliseconds",
        "square_megabytes",
        {"color": "#009E73", "marker": "^"},
    ),
    (
        "cumulative sums",
        "cumsum_milliseconds",
        "cumsum_megabytes",
        {"color": "#CC79A7", "marker": "v"},
    ),
    (
        "flash-linear-attention",
        "fla_milliseconds",
        "fla_megabytes",
        {"color": "0.45", "marker": "s", "linestyle": ":"},
    ),
]


def plot_linear(result: Row, path: Path) -> Path:
    """Draw time and temporary memory by length, and both by chunk size, for every shape.

    Of several dtypes the first is drawn, of several numbers of threads the largest.
    """
    first = result["rows"][0]
    most = max(row.get("threads", 0) for row in result["rows"])
    rows = [
        row
        for row in result["rows"]
        if row["dtype"] == first["dtype"] and row.get("threads", 0) == most
    ]
    shapes = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = make_figure(3 * len(shapes))
    for i, name in enumerate(shapes):
        chosen = [row for row in rows if row["model"] == name]
        time, memory, sweep = grid[3 * i : 3 * i + 3]
        by_length = [row for row in chosen if not row.get("swept")]
        _draw_forms(time, by_length, 1, "ms")
        _draw_forms(memory, by_length, 2, "MB beside the results")
        _draw_sweep(sweep, [row for row in chosen if row.get("swept")], first["chunk_size"])
        time.set_title(f"{name}, D = {chosen[0]['head_dim']}: time", fontsize=9)
        memory.set_title(f"{name}: temporary memory", fontsize=9)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    threads = f", {most} thread{'s'[: most > 1]}" if most else ""
    title = f"Linear attention, {first['dtype']}{threads} (lower is better)"
    return save_figure(figure, title, [result], path)


def _draw_forms(axes: Axes, rows: list[Row], field: int, label: str) -> None:
    for form in _FORMS:
        chosen = [row for row in rows if row.get(form[field], 0) > 0]
        if chosen:
            draw_line(axes, form[0], chosen, itemgetter(form[field]), **form[3])
    use_length_axis(axes, [row["length"] for row in rows], "sequence (tokens)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel(label)


def _draw_sweep(axes: Axes, rows: list[Row], default: int) -> None:
    """Draw everything relative to the default chunk size."""
    if not rows:
        axes.remove()
        return
    rows = sorted(rows, key=itemgetter("chunk_size"))
    (base,) = (row for row in rows if row["chunk_size"] == default)
    sizes = [{**row, "length": row["chunk_size"]} for row in rows]

    def relative(field: str) -> Callable[[Row], float]:
        return lambda row: row[field] / base[field]

    draw_line(axes, "time", sizes, relative("milliseconds"), **_LINEAR)
    draw_line(
        axes, "with its gradient", sizes, relative("both_milliseconds"), **_LINEAR, **_GRADIENT
    )
    memory = {"color": "0.45", "marker": "s", "linestyle": ":"}
    draw_line(axes, "temporary memory", sizes, relative("temporary_megabytes"), **memory)
    use_length_axis(axes, [row["length"] for row in sizes], "chunk size (tokens)")
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    axes.set_ylabel(f"relative to C = {default}")
    axes.set_title(f"chunk size, at {base['length']} tokens", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
