"""Helpers of all figures: size and style, files, maps of layers, heads and positions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2o_prefill.eval.atomic_write import replaced_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Background of absent values: positions that do not exist yet, heads that a layer does not have.
ABSENT = "0.88"
TITLE: dict[str, Any] = {"fontsize": 9, "loc": "left"}
WIDTH = 11.0

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

# Colour-blind safe, and with different line styles for print.
DENSE: dict[str, Any] = {"color": "#0072B2", "label": "dense", "linewidth": 1.6}
SPARSE: dict[str, Any] = {
    "color": "#D55E00",
    "label": "sparse",
    "linewidth": 1.6,
    "linestyle": (0, (5, 1.5)),
}

_MAX_COLUMNS = 512
_MAX_NUMBERED_CELLS = 300


def make_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure, sizes in inches."""
    # Without pyplot, which would keep the figure and might look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(
    figure: Figure, path: str | os.PathLike[str], title: str | None = None, title_size: int = 11
) -> None:
    """Write a figure into a .png, .svg or .pdf file, whole or not at all."""
    if title is not None:
        figure.suptitle(title, fontsize=title_size)
    with replaced_file(path) as scratch:
        figure.savefig(scratch, dpi=150)


def draw_cells(axes: Axes, values: Tensor, **style: Any) -> Any:
    """Draw [rows, columns] as cells, rows upwards; NaN is absent."""
    axes.set_facecolor(ABSENT)
    return axes.imshow(
        values.numpy(), origin="lower", aspect="auto", interpolation="nearest", **style
    )


def draw_map(axes: Axes, values: Tensor, length: int, width: int, **style: Any) -> Any:
    """Draw [rows, bins] with positions to the right and rows upwards."""
    extent = (0, values.shape[1] * width, -0.5, values.shape[0] - 0.5)
    image = draw_cells(axes, values, extent=extent, **style)
    axes.set_xlim(0, length)
    return image


def draw_lines_behind(axes: Axes) -> None:
    """Draw faint grid lines behind a curve, and no frame above and to the right."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def number_cells(
    axes: Axes, values: Tensor, texts: Sequence[Sequence[str]], white_from: float, **style: Any
) -> None:
    """Write a text into every cell of an image of [rows, columns], unless there are too many.

    `white_from` is the value from which the cell is too dark for black; NaN cells stay empty.
    """
    if values.numel() > _MAX_NUMBERED_CELLS:
        return
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            if not math.isnan(value):
                axes.text(
                    column,
                    row,
                    texts[row][column],
                    ha="center",
                    va="center",
                    color="white" if value > white_from else "black",
                    **{"fontsize": 7, **style},
                )


def bin_width(length: int) -> int:
    """Return the number of positions in a column, so that a screen has room for all columns."""
    return -(-length // _MAX_COLUMNS)


def binned(values: Tensor, width: int, highest: bool = False) -> Tensor:
    """Reduce every `width` positions of [rows, T] to their mean, or to the highest."""
    bins = values.split(width, dim=-1)
    return torch.stack([part.amax(-1) if highest else part.mean(-1) for part in bins], dim=-1)


def column_note(width: int, how: str = "mean") -> str:
    """Return the note of an axis of binned positions."""
    return "" if width == 1 else f"\na column is the {how} of {width} positions"


def mark_chunks(axes: Axes, chunk_ends: Sequence[int], color: str = "0.35") -> None:
    """Draw the boundaries of chunks over positions."""
    for end in chunk_ends[:-1]:
        axes.axvline(end, color=color, linewidth=0.8, linestyle=":")


def layer_ticks(axis: Any, layers: Sequence[int], most: int = 8) -> None:
    """Label up to about `most` rows or columns with their layers."""
    count = len(layers)
    step = next(n for n in (1, 2, 5, 10, 20, 50, count) if count <= n * most)
    rows = range(0, count, step)
    axis.set_ticks(rows, [str(layers[row]) for row in rows])


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of the indices 0 .. count - 1, evenly spread, with both ends."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
