"""The figure of an ablation: perplexity against attention flops, or over L and H."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o_prefill.eval.ablation.grid import FIELDS
from h2o_prefill.eval.ablation.table import short_value, varied_settings
from h2o_prefill.eval.plotting import DENSE, SPARSE, draw_lines_behind, make_figure, save_figure
from h2o_prefill.presets import PRESETS

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
    beats in both; these are numbered, and described below by the closest preset. Presets have their
    names. Where every combination of some L and H is there, and nothing else varies, two panels are
    drawn instead: a heat map of the mean KL, and the difference to dense by H, a line for each L.
    Takes a table of `run_ablation`; the default title is what all rows have in common.
    """
    if frame.empty:
        raise ValueError("frame must hold at least one row, got none")
    texts = [rows for _, rows in frame.groupby(_PANEL, sort=False, dropna=False)]
    size = frame["local_window"].nunique() * frame["heavy_budget"].nunique()
    grid = varied_settings(frame) == ["local_window", "heavy_budget"]
    grid = grid and all(len(rows) == size for rows in texts)
    draws = (_draw_grid, _draw_series) if grid else (_draw,)
    panels = [(draw, rows) for rows in texts for draw in draws]
    columns = min(len(panels), len(draws) if grid else _PANELS_PER_ROW)
    lines = -(-len(panels) // columns)
    figure = make_figure(lines * _PANEL_HEIGHT, columns * _PANEL_WIDTH)
    all_axes = figure.subplots(lines, columns, squeeze=False).flatten()
    others = [name for name in ("model", "dtype", "protocol") if frame[name].nunique() > 1]
    for axes, (draw, rows) in zip(all_axes, panels, strict=False):
        draw(axes, rows)
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


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
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
    for i in sorted({*presets, *(best if len(rows) > 1 else ())}, key=flops.__getitem__):
        name = rows["preset"].iloc[i]
        if i not in presets:
            name = str(len(named) + 1)
            named.append(f"{name}: {_describe(rows.iloc[i])}")
        # Inside the figure, and not on the dense line.
        right = flops[i] > 0.3 * min(flops) + 0.7 * max(flops)
        x, y = -5 if right else 5, -3 if sparse[i] < dense else 3
        place: dict[str, Any] = {"xytext": (x, y), "textcoords": "offset points"}
        place |= {"ha": "left" if x > 0 else "right", "va": "bottom" if y > 0 else "top"}
        axes.annotate(name, (flops[i], sparse[i]), fontweight="bold", fontsize=8, **place)
    axes.set_xlabel("\n".join(["attention flops (% of dense)", *named]), fontsize=8)
    axes.set_ylabel("perplexity")
    draw_lines_behind(axes)
    axes.legend(frameon=False)
    percent = (lambda ppl: 100 * (ppl / dense - 1), lambda above: dense * (1 + above / 100))
    above = axes.secondary_yaxis("right", functions=percent)
    above.set_ylabel("above dense (%)")


def _draw_grid(axes: Axes, rows: pd.DataFrame) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator

    names = ("kl_mean", "delta_percent", "attention_flops_ratio", "preset")
    kl, loss, ratio, presets = (
        rows.pivot(index="heavy_budget", columns="local_window", values=name) for name in names
    )
    kl = kl.clip(lower=1e-9)  # 0 has no logarithm
    dark = kl.to_numpy().min() ** 0.4 * kl.to_numpy().max() ** 0.6
    image = axes.imshow(kl, cmap="YlOrRd", norm=LogNorm(), origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(kl.to_numpy()):
        share = 100 / ratio.iat[row, column]
        text = f"{loss.iat[row, column]:+.2f} %\n{value:.4f}\n{share:.0f} % flops"
        preset = presets.iat[row, column]
        text = f"{preset}\n{text}" if isinstance(preset, str) else text
        color = "white" if value > dark else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    axes.set_xticks(range(len(kl.columns)), map(str, kl.columns))
    axes.set_yticks(range(len(kl.index)), map(str, kl.index))
    axes.set_xlabel(
        "local window L\nin a cell: perplexity above dense, mean KL, attention flops of dense",
        fontsize=8,
    )
    axes.set_ylabel("heavy budget H")
    ticks: dict[str, Any] = {"ticks": LogLocator(subs=(1, 2, 5)), "format": "%g"}
    label = "mean KL(dense || sparse), nats"
    axes.figure.colorbar(image, ax=axes, label=label, aspect=40, **ticks).minorticks_off()


def _draw_series(axes: Axes, rows: pd.DataFrame) -> None:
    from matplotlib import colormaps

    axes.axhline(0, **DENSE)
    lines = list(rows.sort_values("heavy_budget").groupby("local_window"))
    style: dict[str, Any] = {"marker": "o", "markersize": 4, "elinewidth": 0.8}
    for (window, line), shade in zip(lines, np.linspace(0.85, 0, len(lines)), strict=True):
        points = line["heavy_budget"].astype(int), line["delta_percent"], line["stderr_percent"]
        axes.errorbar(*points, color=colormaps["viridis"](shade), label=f"L={window}", **style)
    axes.set(xlabel="heavy budget H", ylabel="perplexity above dense (%)")
    axes.set_xticks(sorted(rows["heavy_budget"].unique()))
    axes.legend(frameon=False, fontsize=8)
    draw_lines_behind(axes)


def _describe(row: pd.Series[Any]) -> str:
    """Return the closest preset with its changes; those of recall have no effect without it."""
    texts = []
    for preset, config in PRESETS.items():
        changed = [n for n in FIELDS if short_value(row[n]) != short_value(getattr(config, n))]
        shown = [n for n in changed if row["recall"] or not n.startswith("recall_")]
        changes = (f"{_LETTERS.get(n, n)}={short_value(row[n])}" for n in shown)
        texts.append(" ".join([preset, *changes]))
    return min(texts, key=len)
