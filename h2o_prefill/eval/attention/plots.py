"""The figures of sparse attention: memory sets, and errors by layer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.measures import AttentionMeasures, measure_attention
from h2o_prefill.eval.plotting import PLOT_SUFFIXES, make_figure, save_figure
from h2o_prefill.eval.runs import Progress
from h2o_prefill.selection import SelectionRule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = ("memory", "errors", "stability", "attention")

_MAX_PANELS = 8
_MAX_COLUMNS = 1024
_MAX_NUMBERED_CELLS = 300
# The background shows where there is no value.
_MAP: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest"}
_ABSENT = "0.88"
TITLE: dict[str, Any] = {"fontsize": 9, "loc": "left"}


def visualize_attention_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    output_dir: str | os.PathLike[str] = "benchmark_results/attention_heatmaps",
    figure_format: str = "png",
    *,
    title: str = "",
    select: SelectionRule | None = None,
    on_progress: Progress | None = None,
) -> AttentionMeasures:
    """Draw which positions the memory sets of a prompt contain, and the sparse attention's error.

    `memory.png` shows which positions the KV heads of each layer hold after each chunk (eight of
    the chunks if there are more); `errors.png` the error of each layer and head against dense
    attention, and the share of the dense softmax that falls on visible keys; `stability.png` how
    much the heavy hitters of a layer change from chunk to chunk and differ between layers;
    `attention.png` the dense softmax of eight layers over the whole prompt.

    Parameters
    ----------
    model, input_ids, chunk_config, select, on_progress
        As `measure_attention` takes them.
    output_dir : path
        Folder for the figures, created if necessary.
    figure_format : str
        "png", "svg" or "pdf".
    title : str
        Description of the run, for the figures.

    Returns
    -------
    AttentionMeasures

    Raises
    ------
    ValueError, NotImplementedError
        As `measure_attention` does.
    ImportError
        If matplotlib is missing.
    """
    import matplotlib  # noqa: F401 (a missing package ends the call before the work)

    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {str(folder)!r}")
    if f".{figure_format}" not in PLOT_SUFFIXES:
        formats = ", ".join(suffix[1:] for suffix in PLOT_SUFFIXES)
        raise ValueError(f"figure_format must be one of {formats}, got {figure_format!r}")
    measures = measure_attention(
        model, input_ids, chunk_config, select=select, on_progress=on_progress
    )
    folder.mkdir(parents=True, exist_ok=True)
    plots = (plot_memory, plot_errors, plot_stability, plot_attention)
    for name, plot in zip(FIGURES, plots, strict=True):
        plot(measures, folder / f"{name}.{figure_format}", title)
    return measures


def plot_memory(measures: AttentionMeasures, path: str | os.PathLike[str], title: str) -> Figure:
    """Draw which positions the KV heads of each layer hold, one panel per memory set."""
    ends, rows = measures.chunk_ends, len(measures.layers)
    chunks = np.linspace(0, len(ends) - 1, min(len(ends), _MAX_PANELS)).round().astype(int)
    figure = make_figure(1.3 + len(chunks) * max(1.4, min(4.5, 0.055 * rows)))
    panels = figure.subplots(len(chunks), 1, sharex=True, squeeze=False)[:, 0]
    for chunk, axes in zip(chunks.tolist(), panels, strict=True):
        end = ends[chunk]
        share = adaptive_avg_pool1d(measures.head_share(chunk)[:, :end], min(end, _MAX_COLUMNS))
        extent = (0, end, -0.5, rows - 0.5)
        image = axes.imshow(share.numpy(), extent=extent, cmap="magma_r", vmin=0, vmax=1, **_MAP)
        for boundary in ends[:-1]:
            axes.axvline(boundary, color="0.35", linewidth=0.8, linestyle=":")
        axes.set_facecolor(_ABSENT)
        axes.set_title(f"memory set after chunk {chunk} ({end} tokens)", **TITLE)
        layer_axis(axes, measures.layers, most=8)
    panels[-1].set_xlim(0, ends[-1])
    window = "; black at the end: local window" if measures.config.local_window else ""
    panels[-1].set_xlabel(
        f"position (tokens); dotted: chunk boundaries; grey: later chunks{window}"
    )
    figure.colorbar(image, ax=list(panels), label="share of KV heads that hold it", aspect=30)
    save_figure(figure, path, title)
    return figure


def plot_errors(measures: AttentionMeasures, path: str | os.PathLike[str], title: str) -> Figure:
    """Draw the error and the recalled softmax mass of every layer and query head."""
    figure = make_figure(1.5 + min(9.0, max(2.0, 0.2 * len(measures.layers))))
    left, right = figure.subplots(1, 2, sharey=True)
    layer_axis(left, measures.layers, most=32)
    error, seen = 100 * measures.l1_error.numpy(), 100 * measures.mass_recall.numpy()
    # Dark is worse in both maps, and a run without errors still needs a colour scale.
    worst, least = max(0.1, np.nanmax(error)), min(99.9, np.nanmin(seen))
    head_map(left, error, 0.55 * worst, cmap="YlOrRd", vmin=0, vmax=worst)
    left.set_title("relative L1 error of the output (%)", **TITLE)
    head_map(right, seen, 45 + 0.55 * least, cmap="YlOrRd_r", vmin=least, vmax=100)
    right.set_title("dense softmax mass on visible keys (%)", **TITLE)
    save_figure(figure, path, title)
    return figure


def plot_stability(measures: AttentionMeasures, path: str | os.PathLike[str], title: str) -> Figure:
    """Draw Jaccard indices of heavy hitters: of following chunks by layer, and of two layers."""
    figure = make_figure(1.5 + min(9.0, max(2.0, 0.16 * len(measures.layers))))
    left, right = figure.subplots(1, 2)
    by_chunk = measures.heavy_jaccard.nanmean(-1).T.numpy()
    pairs = measures.heavy_jaccard_of_layers.numpy()
    for axes, values in ((left, by_chunk), (right, pairs)):
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, **_MAP)
        axes.set_facecolor(_ABSENT)
        layer_axis(axes, measures.layers, most=16)
    left.set_title("heavy hitters after a chunk and after the one before", **TITLE)
    left.set_xlabel("chunk")
    left.set_xticks(range(by_chunk.shape[1]), map(str, range(1, by_chunk.shape[1] + 1)))
    right.set_title("heavy hitters of two layers after the last chunk, any KV head", **TITLE)
    right.set_xlabel("layer")
    right.set_xticks(right.get_yticks(), [tick.get_text() for tick in right.get_yticklabels()])
    figure.colorbar(image, ax=[left, right], label="Jaccard index", aspect=40)
    save_figure(figure, path, title)
    return figure


def plot_attention(measures: AttentionMeasures, path: str | os.PathLike[str], title: str) -> Figure:
    """Draw the dense softmax of layers over the prompt, mean of the query heads of each."""
    from matplotlib.colors import LogNorm

    layers = np.linspace(0, len(measures.layers) - 1, min(len(measures.layers), _MAX_PANELS))
    columns = min(len(layers), _MAX_PANELS // 2)
    lines = -(-len(layers) // columns)
    figure = make_figure(0.8 + 2.9 * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    end = measures.chunk_ends[-1]
    for row, axes in zip(layers.round().astype(int).tolist(), panels, strict=False):
        share = measures.pattern[:, row].nanmean(1).numpy()
        scale = LogNorm(1e-4, 1, clip=True)
        style = {**_MAP, "origin": "upper", "extent": (0, end, end, 0)}
        image = axes.imshow(np.ma.masked_equal(share, 0), cmap="magma_r", norm=scale, **style)
        axes.set_facecolor(_ABSENT)
        axes.set_title(f"layer {measures.layers[row]}", **TITLE)
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    figure.supxlabel("key (tokens)", fontsize=9)
    figure.supylabel("query (tokens)", fontsize=9)
    label = f"share of a query's attention on {-(-end // measures.pattern.shape[0])} keys"
    figure.colorbar(image, ax=list(panels), label=label, aspect=40)
    save_figure(figure, path, title)
    return figure


def head_map(axes: Axes, values: Any, middle: float, form: str = ".1f", **style: Any) -> None:
    """Draw [layers, heads]; numbers on the dark side of `middle` are white."""
    image = axes.imshow(values, **style, **_MAP)
    axes.set_facecolor(_ABSENT)
    axes.set_xlabel("query head")
    axes.locator_params(axis="x", integer=True)
    axes.figure.colorbar(image, ax=axes, aspect=40, pad=0.01)
    if values.size > _MAX_NUMBERED_CELLS:
        return
    low_is_dark = style["cmap"].endswith("_r")
    for (row, head), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "white" if (value < middle) == low_is_dark else "black"
            axes.text(
                head, row, f"{value:{form}}", ha="center", va="center", color=color, fontsize=7
            )


def layer_axis(axes: Axes, layers: tuple[int, ...], most: int) -> None:
    """Name the rows of a figure, at most `most` of them."""
    step = next(n for n in (1, 2, 5, 10, 20, 50, len(layers)) if len(layers) <= n * most)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel("layer")
