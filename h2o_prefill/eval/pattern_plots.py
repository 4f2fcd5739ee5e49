"""Figures of attention patterns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .pattern_measures import head_share, heavy_overlap
from .patterns import AttentionPatterns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST_POSITIONS = 4

_MAX_COLUMNS = 512
_MAX_PANELS = 8
_NOT_YET = "0.88"
_TITLE: dict[str, Any] = {"fontsize": 9, "loc": "left"}


def plot_patterns(patterns: AttentionPatterns, folder: Path, title: str = "") -> dict[str, Path]:
    """Draw every figure into PNG files.

    Parameters
    ----------
    patterns : AttentionPatterns
    folder : Path
        Is there already.
    title : str
        What was run.

    Returns
    -------
    dict of str to Path
        "memory", "scores", "sinks", "heavy".
    """
    figures = {
        "memory": plot_memory(patterns),
        "scores": plot_scores(patterns),
        "sinks": plot_sinks(patterns),
        "heavy": plot_heavy(patterns),
    }
    paths = {}
    for name, figure in figures.items():
        if title:
            figure.suptitle(title, fontsize=10)
        paths[name] = folder / f"{name}.png"
        figure.savefig(paths[name], dpi=150)
    return paths


def plot_memory(patterns: AttentionPatterns) -> Figure:
    """Draw which positions the heads of each layer hold, a panel for the set after each chunk.

    With more than eight chunks, eight of them, the first and the last included.
    """
    length = patterns.chunk_ends[-1]
    width = _bin_width(length)
    share = head_share(patterns.memory, length)
    panels = _some(len(patterns.chunk_ends), _MAX_PANELS)
    figure = _figure(11, 1.3 + len(panels) * _map_height(patterns, 1.4))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for chunk, panel in zip(panels, axes, strict=True):
        end = patterns.chunk_ends[chunk]
        values = _binned(share[chunk], width).masked_fill(
            torch.arange(0, length, width) >= end, math.nan
        )
        image = _map(panel, values, length, width, cmap="magma_r", vmin=0, vmax=1)
        panel.set_title(_set_name(chunk, patterns), **_TITLE)
        _mark_chunks(panel, patterns)
        _layer_ticks(panel.yaxis, patterns)
        panel.set_ylabel("layer")
    axes[-1].set_xlabel(
        f"position (tokens; dotted: chunk boundaries; grey: not prefilled yet){_of(width)}"
    )
    figure.colorbar(image, ax=list(axes), label="share of KV heads that hold it", aspect=30)
    return figure


def plot_scores(patterns: AttentionPatterns) -> Figure:
    """Draw the attention that each position received, mean over the KV heads, on a log scale."""
    from matplotlib.colors import LogNorm

    length = patterns.chunk_ends[-1]
    width = _bin_width(length)
    # The highest of a bin: a single heavy position must not drown among its neighbours.
    values = _binned(patterns.scores.mean(1), width, highest=True)
    positive = values[values > 0]
    # The first position may receive a thousand times what the others do: it alone would take up
    # the scale.
    low, high = positive.quantile(0.01).item(), positive.quantile(0.995).item()
    figure = _figure(11, 1.6 + _map_height(patterns, 3.0))
    axes = figure.subplots()
    norm = LogNorm(min(low, high / 10), high, clip=True)
    image = _map(axes, values, length, width, cmap="inferno", norm=norm)
    _mark_chunks(axes, patterns, color="white")
    _layer_ticks(axes.yaxis, patterns)
    axes.set_ylabel("layer")
    axes.set_xlabel(f"position (tokens; dotted: chunk boundaries){_of(width, 'highest')}")
    axes.set_title("attention that each position received (mean of KV heads)", **_TITLE)
    figure.colorbar(image, ax=axes, label="score, summed over queries", extend="both")
    return figure


def plot_sinks(patterns: AttentionPatterns) -> Figure:
    """Draw the share of KV heads that hold the first positions after the last chunk, by layer."""
    length = patterns.chunk_ends[-1]
    count = min(FIRST_POSITIONS, length)
    share = head_share(patterns.memory, length)[-1]
    figure = _figure(11, 3.6)
    axes = figure.subplots()
    rows = range(len(patterns.layers))
    axes.bar(
        rows,
        share[:, :count].mean(1).tolist(),
        color="#0072B2",
        label=f"positions 0 to {count - 1}, mean",
    )
    axes.plot(
        rows,
        share[:, 0].tolist(),
        linestyle="none",
        marker="D",
        markersize=5,
        color="#D55E00",
        label="position 0",
        clip_on=False,
        zorder=3,
    )
    chance = share.mean().item()
    axes.axhline(
        chance,
        color="0.25",
        linestyle="--",
        linewidth=1,
        label=f"all positions, mean ({chance:.2f})",
    )
    axes.set_title("the first positions in the memory set after the last chunk", **_TITLE)
    axes.set_ylim(0, 1.05)
    axes.set_xlim(-0.6, len(patterns.layers) - 0.4)
    _layer_ticks(axes.xaxis, patterns, most=32)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of KV heads that hold it")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    return figure


def plot_heavy(patterns: AttentionPatterns) -> Figure:
    """Draw how many heavy positions stay from one memory set to the next, by layer."""
    overlap = heavy_overlap(patterns.memory, patterns.chunk_ends, patterns.config).nanmean(-1)
    steps, layers = overlap.shape
    figure = _figure(11, 2.6 + min(4.0, 0.35 * steps))
    axes = figure.subplots()
    image = axes.imshow(
        overlap.numpy(), origin="upper", aspect="auto", cmap="Blues", vmin=0, vmax=1
    )
    if steps * layers <= 300:
        for (row, column), value in _cells(overlap):
            color = "white" if value > 0.6 else "black"
            axes.text(
                column,
                row,
                f"{value:.2f}".lstrip("0"),
                ha="center",
                va="center",
                fontsize=7,
                color=color,
            )
    axes.set_title("heavy positions that stay from one memory set to the next", **_TITLE)
    chunks = _some(steps, 16)
    axes.set_yticks(chunks, [f"{chunk} to {chunk + 1}" for chunk in chunks])
    _layer_ticks(axes.xaxis, patterns, most=32)
    axes.set_xlabel("layer")
    axes.set_ylabel("sets after chunks")
    figure.colorbar(image, ax=axes, label="Jaccard index,\nmean of KV heads")
    return figure


def _figure(width: float, height: float) -> Figure:
    # A Figure of its own with the Agg canvas: pyplot would keep it, and might look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _map(axes: Axes, values: Tensor, length: int, width: int, **style: Any) -> Any:
    """Draw [layers, bins] with positions to the right and layers upwards."""
    axes.set_facecolor(_NOT_YET)
    extent = (0, values.shape[1] * width, -0.5, values.shape[0] - 0.5)
    image = axes.imshow(
        values.numpy(),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=extent,
        **style,
    )
    axes.set_xlim(0, length)
    return image


def _bin_width(length: int) -> int:
    """Return the positions of a column: a screen has no room for one column each."""
    return -(-length // _MAX_COLUMNS)


def _binned(values: Tensor, width: int, highest: bool = False) -> Tensor:
    """Put `width` positions of [layers, T] together: their mean, or the highest of them."""
    bins = values.split(width, dim=-1)
    return torch.stack([part.amax(-1) if highest else part.mean(-1) for part in bins], dim=-1)


def _of(width: int, how: str = "mean") -> str:
    return "" if width == 1 else f"\na column is the {how} of {width} positions"


def _map_height(patterns: AttentionPatterns, least: float) -> float:
    return min(4.5, max(least, 0.055 * len(patterns.layers)))


def _mark_chunks(axes: Axes, patterns: AttentionPatterns, color: str = "0.35") -> None:
    for end in patterns.chunk_ends[:-1]:
        axes.axvline(end, color=color, linewidth=0.8, linestyle=":")


def _layer_ticks(axis: Any, patterns: AttentionPatterns, most: int = 8) -> None:
    count = len(patterns.layers)
    step = next(n for n in (1, 2, 5, 10, 20, 50, count) if count <= n * most)
    rows = range(0, count, step)
    axis.set_ticks(rows, [str(patterns.layers[row]) for row in rows])


def _set_name(chunk: int, patterns: AttentionPatterns) -> str:
    last = len(patterns.chunk_ends) - 1
    follower = "a next call would attend" if chunk == last else f"chunk {chunk + 1} attends"
    solid = "; solid at its end: the local window" if patterns.config.local_window else ""
    end = patterns.chunk_ends[chunk]
    return f"memory set after chunk {chunk} ({end} tokens): what {follower} to{solid}"


def _some(count: int, most: int) -> list[int]:
    """Return up to `most` of the indices 0 .. count - 1, evenly spread, with both ends."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def _cells(values: Tensor) -> list[tuple[tuple[int, int], float]]:
    """Return index and value of every cell that has one."""
    return [
        ((row, column), value)
        for row, line in enumerate(values.tolist())
        for column, value in enumerate(line)
        if not math.isnan(value)
    ]
