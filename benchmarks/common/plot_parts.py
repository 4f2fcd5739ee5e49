"""What the figures of all benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from h2o_prefill.eval import plotting

Row = dict[str, Any]


def make_figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, at most three in a row."""
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    figure = plotting.make_figure(3.4 * rows + 0.5, 4.4 * columns)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[panels:]:
        axes.remove()
    for axes in grid[:panels]:
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid[:panels]


def draw_line(
    axes: Axes, label: str, rows: list[Row], value: Callable[[Row], float], **style: Any
) -> None:
    """Draw a value of rows by their length."""
    lengths, values = [row["length"] for row in rows], [value(row) for row in rows]
    axes.plot(lengths, values, label=label, **{"linewidth": 1.6, "markersize": 4, **style})


def use_length_axis(axes: Axes, lengths: list[int], label: str = "prompt (tokens)") -> None:
    """Make the x axis one of these lengths, which double."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.margins(x=0.1)
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def save_figure(figure: Figure, title: str, sources: list[Row | None], path: Path) -> Path:
    """Write a figure, with the machine below its title; return the file."""
    source = next(source for source in sources if source)
    facts = source["environment"]
    quick = " (quick: the figures mean nothing)" if source["quick"] else ""
    machine = f"{facts['cpu']}, {facts['library']['cpu_isa_used']}, torch {facts['torch']}"
    figure.suptitle(f"{title}{quick}\n{machine}", fontsize=10)
    figure.savefig(path, dpi=150)
    return path


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)
