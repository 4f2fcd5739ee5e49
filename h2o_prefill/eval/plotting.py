"""Size, style and files of all figures."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from h2o_prefill._atomic_write import replaced_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def make_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure, sizes in inches."""
    # Without pyplot, which would keep the figure and might look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str], title: str | None = None) -> None:
    """Write a figure into a .png, .svg or .pdf file, whole or not at all."""
    if title is not None:
        figure.suptitle(title, fontsize=10)
    with replaced_file(path) as scratch:
        figure.savefig(scratch, dpi=150)


def draw_lines_behind(axes: Axes) -> None:
    """Draw faint grid lines behind a curve, and no frame above and to the right."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
