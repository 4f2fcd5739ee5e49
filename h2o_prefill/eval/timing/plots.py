"""Figures of throughput and memory by prompt length."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from h2o_prefill.eval.plotting import DENSE, SPARSE, draw_lines_behind, make_figure, save_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 9.6, 4.2
_BAR = 0.36
_STATE = "#009E73"


def plot_throughput(frame: pd.DataFrame, path: str | os.PathLike[str], title: str = "") -> Figure:
    """Draw tokens per second, dense and sparse, with their ratio and that of attention flops."""
    figure = make_figure(_HEIGHT, _WIDTH)
    rate, ratio = figure.subplots(1, 2)
    ticks = range(len(frame))
    for name, style in (("dense", DENSE), ("sparse", SPARSE)):
        rate.plot(ticks, frame[f"{name}_tokens_per_second"], marker="o", **style)
    rate.set_ylabel("tokens / s")
    rate.set_title("prefill throughput (higher is better)", fontsize=10)
    speedup = frame["speedup"]
    spread = [speedup - frame["speedup_min"], frame["speedup_max"] - speedup]
    measured = {"color": SPARSE["color"], "label": "speed-up (bars: lowest and highest round)"}
    ratio.errorbar(ticks, speedup, spread, marker="o", capsize=3, **measured)
    counted = {"color": "0.45", "label": "attention flops, dense / sparse", "linestyle": ":"}
    ratio.plot(ticks, frame["attention_flops_ratio"], marker="s", markersize=4, **counted)
    ratio.axhline(1, color="0.3", linewidth=0.8)
    ratio.set_ylabel("dense / sparse")
    ratio.set_title("the whole model, and its attention alone", fontsize=10)
    for axes in (rate, ratio):
        _finish(axes, frame)
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path, title)
    return figure


def plot_memory(frame: pd.DataFrame, path: str | os.PathLike[str], title: str = "") -> Figure:
    """Draw the peak memory of a prefill without the weights, and its components."""
    figure = make_figure(_HEIGHT, _WIDTH)
    whole, state = figure.subplots(1, 2, width_ratios=(3, 2))
    kept, added = frame["kv_cache_bytes"] / 1e6, frame["state_bytes"] / 1e6
    dense, sparse = frame["dense_peak_bytes"] / 1e6, frame["sparse_peak_bytes"] / 1e6
    left, right = -_BAR / 2, _BAR / 2
    for shift, low, high, color, label in (
        (left, 0 * kept, kept, "0.7", "KV cache"),
        (right, 0 * kept, kept, "0.7", None),
        (left, kept, dense, DENSE["color"], "dense: activations, workspace"),
        (right, kept, kept + added, _STATE, "sparse: scores and memory sets"),
        (right, kept + added, sparse, SPARSE["color"], "sparse: activations, workspace"),
    ):
        ticks = [tick + shift for tick in range(len(frame))]
        whole.bar(ticks, high - low, _BAR, low, color=color, label=label)
    whole.set_title("peak of a prefill beside the weights", fontsize=10)
    whole.set_ylabel("MB")
    whole.legend(frameon=False, fontsize=8, reverse=True)
    state.plot(range(len(frame)), 100 * added / kept, color=_STATE, marker="o")
    state.set_title("scores and memory sets", fontsize=10)
    state.set_ylabel("% of the KV cache")
    for axes in (whole, state):
        _finish(axes, frame)
    save_figure(figure, path, title)
    return figure


def _finish(axes: Axes, frame: pd.DataFrame) -> None:
    axes.set_xticks(range(len(frame)), [f"{length:,}" for length in frame["seq_length"]])
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    draw_lines_behind(axes)
