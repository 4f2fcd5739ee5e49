"""Figures of attention patterns."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_prefill.eval.attention.error_plots import plot_chunks, plot_errors
from h2o_prefill.eval.attention.pattern_measures import (
    head_share,
    heavy_overlap,
    heavy_positions,
    heavy_survival,
)
from h2o_prefill.eval.attention.patterns import AttentionPatterns
from h2o_prefill.eval.attention.recall_plots import plot_recalled
from h2o_prefill.eval.plotting import (
    TITLE,
    bin_width,
    binned,
    column_note,
    draw_map,
    layer_ticks,
    make_figure,
    mark_chunks,
    number_cells,
    save_figure,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST_POSITIONS = 4

_MAX_PANELS = 8


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
        As `AttentionPatterns.paths`.
    """
    draw: dict[str, Callable[[], Figure]] = {
        "memory": lambda: plot_memory(patterns),
        "scores": lambda: plot_scores(patterns),
        "sinks": lambda: plot_sinks(patterns),
        "heavy": lambda: plot_heavy(patterns),
        "survival": lambda: plot_survival(patterns),
    }
    measures, recalled = patterns.measures, patterns.recalled
    if measures is not None:
        draw["errors"] = lambda: plot_errors(measures)
        draw["chunks"] = lambda: plot_chunks(measures)
    if recalled is not None:
        draw["recalled"] = lambda: plot_recalled(recalled, patterns.chunk_ends)
    paths = {}
    for name, make in draw.items():
        figure = make()
        if title:
            figure.suptitle(title, fontsize=10)
        paths[name] = folder / f"{name}.png"
        save_figure(figure, paths[name])
    return paths


def plot_memory(patterns: AttentionPatterns) -> Figure:
    """Draw which positions the heads of each layer hold, a panel for the set after each chunk.

    With more than eight chunks, eight of them, the first and the last included.
    """
    length = patterns.chunk_ends[-1]
    width = bin_width(length)
    share = head_share(patterns.memory, length, patterns.kv_heads)
    panels = spread(len(patterns.chunk_ends), _MAX_PANELS)
    figure = make_figure(1.3 + len(panels) * _map_height(patterns, 1.4))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for chunk, panel in zip(panels, axes, strict=True):
        end = patterns.chunk_ends[chunk]
        values = binned(share[chunk], width).masked_fill(
            torch.arange(0, length, width) >= end, math.nan
        )
        image = draw_map(panel, values, length, width, cmap="magma_r", vmin=0, vmax=1)
        panel.set_title(_set_name(chunk, patterns), **TITLE)
        mark_chunks(panel, patterns.chunk_ends)
        layer_ticks(panel.yaxis, patterns.layers)
        panel.set_ylabel("layer")
    axes[-1].set_xlabel(
        f"position (tokens; dotted: chunk boundaries; grey: not prefilled yet){column_note(width)}"
    )
    figure.colorbar(image, ax=list(axes), label="share of KV heads that hold it", aspect=30)
    return figure


def plot_scores(patterns: AttentionPatterns) -> Figure:
    """Draw the attention that each position received, mean over the KV heads, on a log scale."""
    from matplotlib.colors import LogNorm

    length = patterns.chunk_ends[-1]
    width = bin_width(length)
    # The highest of a bin: a single heavy position must not drown among its neighbours.
    values = binned(patterns.scores.nanmean(1), width, highest=True)
    positive = values[values > 0]
    # The first position may receive a thousand times what the others do: it alone would take up
    # the scale.
    low, high = positive.quantile(0.01).item(), positive.quantile(0.995).item()
    figure = make_figure(1.6 + _map_height(patterns, 3.0))
    axes = figure.subplots()
    norm = LogNorm(min(low, high / 10), high, clip=True)
    image = draw_map(axes, values, length, width, cmap="inferno", norm=norm)
    mark_chunks(axes, patterns.chunk_ends, color="white")
    layer_ticks(axes.yaxis, patterns.layers)
    axes.set_ylabel("layer")
    axes.set_xlabel(f"position (tokens; dotted: chunk boundaries){column_note(width, 'highest')}")
    axes.set_title("attention that each position received (mean of KV heads)", **TITLE)
    figure.colorbar(image, ax=axes, label="score, summed over queries", extend="both")
    return figure


def plot_sinks(patterns: AttentionPatterns) -> Figure:
    """Draw the share of KV heads that hold the first positions after the last chunk, by layer."""
    length = patterns.chunk_ends[-1]
    count = min(FIRST_POSITIONS, length)
    share = head_share(patterns.memory, length, patterns.kv_heads)[-1]
    figure = make_figure(3.6)
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
    axes.set_title("the first positions in the memory set after the last chunk", **TITLE)
    axes.set_ylim(0, 1.05)
    axes.set_xlim(-0.6, len(patterns.layers) - 0.4)
    layer_ticks(axes.xaxis, patterns.layers, most=32)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of KV heads that hold it")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    return figure


def plot_heavy(patterns: AttentionPatterns) -> Figure:
    """Draw how many heavy positions stay from one memory set to the next, by layer."""
    overlap = heavy_overlap(_heavy(patterns)).nanmean(-1)
    steps = overlap.shape[0]
    figure = make_figure(2.6 + min(4.0, 0.35 * steps))
    axes = figure.subplots()
    image = axes.imshow(
        overlap.numpy(), origin="upper", aspect="auto", cmap="Blues", vmin=0, vmax=1
    )
    texts = [[f"{value:.2f}".lstrip("0") for value in line] for line in overlap.tolist()]
    number_cells(axes, overlap, texts, white_from=0.6)
    axes.set_title("heavy positions that stay from one memory set to the next", **TITLE)
    chunks = spread(steps, 16)
    axes.set_yticks(chunks, [f"{chunk} to {chunk + 1}" for chunk in chunks])
    layer_ticks(axes.xaxis, patterns.layers, most=32)
    axes.set_xlabel("layer")
    axes.set_ylabel("sets after chunks")
    figure.colorbar(image, ax=axes, label="Jaccard index,\nmean of KV heads")
    return figure


def plot_survival(patterns: AttentionPatterns) -> Figure:
    """Draw for how many chunks heavy positions stay in the memory set, a line a layer."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    survival = heavy_survival(_heavy(patterns))
    later = range(survival.shape[0])
    norm = Normalize(patterns.layers[0], max(patterns.layers[-1], patterns.layers[0] + 1))
    colors = colormaps["viridis"]
    figure = make_figure(3.8)
    axes = figure.subplots()
    marker = "o" if len(later) <= 16 else None
    for row, layer in enumerate(patterns.layers):
        shares = survival[:, row].tolist()
        axes.plot(
            later, shares, color=colors(norm(layer)), linewidth=0.9, marker=marker, markersize=3
        )
    mean = survival.nanmean(1).tolist()
    axes.plot(later, mean, color="black", linewidth=2.2, marker=marker, label="mean of layers")
    axes.set_title("heavy positions still heavy that many chunks later", **TITLE)
    axes.set_ylim(0, 1.03)
    axes.set_xticks(spread(len(later), 16))
    axes.set_xlabel("chunks after the first memory set that held the position as heavy")
    axes.set_ylabel("share still held")
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=axes, label="layer")
    return figure


def _heavy(patterns: AttentionPatterns) -> Tensor:
    return heavy_positions(patterns.memory, patterns.chunk_ends, patterns.config, patterns.layers)


def _map_height(patterns: AttentionPatterns, least: float) -> float:
    return min(4.5, max(least, 0.055 * len(patterns.layers)))


def _set_name(chunk: int, patterns: AttentionPatterns) -> str:
    last = len(patterns.chunk_ends) - 1
    follower = "a next call would attend" if chunk == last else f"chunk {chunk + 1} attends"
    solid = "; solid at its end: the local window" if patterns.config.local_window else ""
    end = patterns.chunk_ends[chunk]
    return f"memory set after chunk {chunk} ({end} tokens): what {follower} to{solid}"
