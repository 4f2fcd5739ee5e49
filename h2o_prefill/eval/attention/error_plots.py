"""Figures of the errors of sparse attention against dense attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from h2o_prefill.eval.attention.result import AttentionMeasures
from h2o_prefill.eval.plotting import (
    TITLE,
    draw_cells,
    layer_ticks,
    make_figure,
    number_cells,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ERROR_NAME = "relative L1 error of the output"
MASS_NAME = "dense softmax mass on visible keys"

# Share of the colour scale from which on cells are too dark for black.
_DARK = 0.55


def plot_errors(measures: AttentionMeasures) -> Figure:
    """Draw the error and the recalled softmax mass of every layer and query head."""
    figure = make_figure(1.5 + min(9.0, max(2.0, 0.2 * len(measures.layers))))
    left, right = figure.subplots(1, 2, sharey=True)
    # Dark is bad in both maps.
    error = _head_map(left, 100 * measures.l1_error, 0, "YlOrRd")
    figure.colorbar(error, ax=left, label="% (0: exact)", aspect=40, pad=0.01)
    mass = _head_map(right, 100 * measures.mass_recall, 100, "YlOrRd_r")
    figure.colorbar(mass, ax=right, label="% (100: all of it)", aspect=40, pad=0.01)
    left.set_title(ERROR_NAME, **TITLE)
    right.set_title(MASS_NAME, **TITLE)
    left.set_ylabel("layer")
    layer_ticks(left.yaxis, measures.layers, most=32)
    return figure


def _head_map(axes: Axes, values: Tensor, perfect: float, colors: str) -> Any:
    """Draw percentages of [layers, heads], coloured from the perfect one to the worst of them."""
    badness = (values - perfect).abs()
    # A run without errors still needs a scale.
    worst = max(badness.nan_to_num().amax().item(), 0.1)
    lowest, highest = (perfect - worst if perfect else 0), perfect or worst
    image = draw_cells(axes, values, cmap=colors, vmin=lowest, vmax=highest)
    texts = [[f"{value:.1f}" for value in line] for line in values.tolist()]
    number_cells(axes, badness, texts, white_from=_DARK * worst)
    axes.set_xlabel("query head")
    axes.set_xticks(spread(values.shape[1], 16))
    return image


def plot_chunks(measures: AttentionMeasures) -> Figure:
    """Draw both measures, and the stability of memory sets, chunk by chunk."""
    chunks = range(len(measures.chunk_ends))
    figure = make_figure(3.9)
    error, mass, stable = figure.subplots(1, 3)
    _chunk_lines(error, chunks, 100 * measures.l1_error_by_chunk, ERROR_NAME, "%")
    _chunk_lines(mass, chunks, 100 * measures.mass_recall_by_chunk, MASS_NAME, "%")
    ticks = spread(len(chunks), 12)
    error.set_ylim(bottom=0)
    mass.set_ylim(top=100)
    _chunk_lines(
        stable,
        chunks[2:],
        measures.jaccard[:-1],
        "memory set and that of the chunk before",
        "Jaccard index",
    )
    stable.set_ylim(0, 1.03)
    stable.set_xlim(error.get_xlim())
    for axes in (error, mass, stable):
        axes.set_xticks(ticks)
    handles, names = error.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=3)
    return figure


def _chunk_lines(axes: Axes, chunks: range, values: Tensor, title: str, unit: str) -> None:
    """Draw [chunks, layers, heads]: mean and spread over all heads of all layers."""
    heads = values.flatten(1)
    axes.set_title(title, **TITLE)
    axes.set_xlabel("chunk")
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    if not len(chunks):
        axes.text(0.5, 0.5, "needs three chunks", transform=axes.transAxes, ha="center")
        return
    low, middle, high = (heads.nanquantile(share, dim=1).tolist() for share in (0.1, 0.5, 0.9))
    color = "#0072B2"
    axes.fill_between(chunks, low, high, color=color, alpha=0.2, label="8 of 10 heads", linewidth=0)
    axes.plot(chunks, middle, color=color, linewidth=1, linestyle="--", label="median head")
    mean = heads.nanmean(1).tolist()
    axes.plot(
        chunks,
        mean,
        color=color,
        linewidth=2,
        marker="o",
        markersize=4,
        label="mean",
        clip_on=False,
        zorder=3,
    )
