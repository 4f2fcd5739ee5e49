"""The figure of an ablation: perplexity against attention flops, or a heat map over L and H."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o_prefill.eval.ablation.table import short_value, varied_settings
from h2o_prefill.eval.plotting import DENSE, SPARSE, make_figure, save_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LETTERS = {"chunk_size": "S", "local_window": "L", "heavy_budget": "H", "sink_tokens": "K"}

# Perplexities are comparable only if all of these are equal: one panel each.
_PANEL = ["model", "dtype", "dataset", "text_source", "context", "windows", "protocol"]

_PANELS_PER_ROW = 3
_PANEL_WIDTH, _PANEL_HEIGHT = 5.4, 4.4


def plot_ablation(
    frame: pd.DataFrame, path: str | os.PathLike[str], title: str | None = None
) -> Figure:
    """Draw the perplexity of each cell against its attention flops, a panel for each text.

    The error bars are those of the difference to dense. The line joins the cells that no other cell
    beats in both; these are numbered, and named below by the settings that vary. Presets have their
    names. A panel with every combination of some L and H, and nothing else that varies, is a heat
    map of the mean KL instead, with the difference to dense in numbers. Takes a table of
    `run_ablation`; the default title is what all rows have in common.
    """
    if frame.empty:
        raise ValueError("frame must hold at least one row, got none")
    panels = list(frame.groupby(_PANEL, sort=False, dropna=False))
    columns = min(len(panels), _PANELS_PER_ROW)
    lines = -(-len(panels) // columns)
    figure = make_figure(lines * _PANEL_HEIGHT, columns * _PANEL_WIDTH)
    all_axes = figure.subplots(lines, columns, squeeze=False).flatten()
    varied = varied_settings(frame)
    others = [name for name in ("model", "dtype", "protocol") if frame[name].nunique() > 1]
    for axes, (_, rows) in zip(all_axes, panels, strict=False):
        if _is_grid(rows, varied):
            _draw_grid(axes, rows)
        else:
            _draw(axes, rows, varied)
        row = rows.iloc[0]
        text = f"{row['dataset']}, windows {row['windows']} of {row['context']} tokens"
        axes.set_title(", ".join([text, *(str(row[name]) for name in others)]), fontsize=10)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    if title is None:
        names = ("model", "dtype", "protocol")
        common = [str(frame[name].iloc[0]) for name in names if name not in others]
        title = ", ".join([*common, f"{len(frame)} settings"])
    save_figure(figure, path, title)
    return figure


def front(flops: Sequence[float], perplexity: Sequence[float]) -> list[int]:
    """Return the points that no other point beats in both, by rising flops."""
    chosen: list[int] = []
    for index in sorted(range(len(flops)), key=lambda i: (flops[i], perplexity[i])):
        if not chosen or perplexity[index] < perplexity[chosen[-1]]:
            chosen.append(index)
    return chosen


def _draw(axes: Axes, rows: pd.DataFrame, varied: list[str]) -> None:
    dense = float(rows["dense_ppl"].iloc[0])
    flops = [100 / ratio for ratio in rows["attention_flops_ratio"]]
    sparse = rows["sparse_ppl"].tolist()
    errors = (rows["dense_ppl"] * rows["stderr_percent"] / 100).tolist()
    axes.axhline(dense, **DENSE)
    style: dict[str, Any] = {"color": SPARSE["color"], "label": SPARSE["label"]}
    axes.errorbar(flops, sparse, errors, fmt="o", markersize=4, elinewidth=0.8, **style)
    best = front(flops, sparse)
    axes.plot(
        [flops[i] for i in best], [sparse[i] for i in best], color="0.5", linewidth=0.8, zorder=0
    )
    named: list[str] = []
    presets = [i for i, preset in enumerate(rows["preset"]) if isinstance(preset, str)]
    for i in sorted({*best, *presets}, key=flops.__getitem__) if varied else ():
        _annotate(axes, (flops[i], sparse[i]), rows.iloc[i], varied, named)
    axes.set_xlabel("\n".join(["attention flops (% of dense)", *named]), fontsize=8)
    axes.set_ylabel("perplexity")
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    axes.spines[["top"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    percent = (lambda ppl: 100 * (ppl / dense - 1), lambda above: dense * (1 + above / 100))
    above = axes.secondary_yaxis("right", functions=percent)
    above.set_ylabel("above dense (%)")


def _is_grid(rows: pd.DataFrame, varied: list[str]) -> bool:
    sizes = rows["local_window"].nunique(), rows["heavy_budget"].nunique()
    return {*varied} == {"local_window", "heavy_budget"} and len(rows) == sizes[0] * sizes[1]


def _draw_grid(axes: Axes, rows: pd.DataFrame) -> None:
    from matplotlib.colors import LogNorm

    names = ("kl_mean", "delta_percent", "attention_flops_ratio")
    kl, loss, ratio = (
        rows.pivot(index="heavy_budget", columns="local_window", values=name) for name in names
    )
    dark = kl.to_numpy().min() ** 0.4 * kl.to_numpy().max() ** 0.6
    image = axes.imshow(kl, cmap="YlOrRd", norm=LogNorm(), origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(kl.to_numpy()):
        share = 100 / ratio.iat[row, column]
        text = f"{loss.iat[row, column]:+.2f} %\n{value:.4f}\n{share:.0f} % flops"
        color = "white" if value > dark else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    axes.set_xticks(range(len(kl.columns)), map(str, kl.columns))
    axes.set_yticks(range(len(kl.index)), map(str, kl.index))
    axes.set_xlabel(
        "local window L\nin a cell: perplexity above dense, mean KL, attention flops of dense",
        fontsize=8,
    )
    axes.set_ylabel("heavy budget H")
    axes.figure.colorbar(image, ax=axes, label="mean KL(dense || sparse), nats", aspect=40)


def _annotate(
    axes: Axes, point: tuple[float, float], row: pd.Series[Any], varied: list[str], named: list[str]
) -> None:
    """Name a preset at its point; other settings get a number there, explained in `named`."""
    label = row["preset"]
    if not isinstance(label, str):
        settings = " ".join(
            f"{_LETTERS.get(name, name)}={short_value(row[name])}" for name in varied
        )
        label = str(len(named) + 1)
        named.append(f"{label}: {settings}")
    right = point[0] > 90  # where a name would leave the figure
    place: dict[str, Any] = {"xytext": (-5 if right else 5, 3), "ha": "right" if right else "left"}
    axes.annotate(label, point, fontweight="bold", fontsize=8, textcoords="offset points", **place)
