"""The figures of evaluations: the title says what was found, the line below what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import NullLocator
from torch import Tensor
from torch.nn.functional import adaptive_max_pool1d

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation_table import FIELDS, presets, varied_settings
from h2o_prefill.eval.attention import AttentionMeasures, measure_attention
from h2o_prefill.eval.report import output_folder
from h2o_prefill.generation.runs import Progress

File = str | os.PathLike[str]
Style = dict[str, Any]

SUFFIXES = (".png", ".svg", ".pdf")

# Told apart by people who see colours differently, and by marker and line style in print.
DENSE: Style = {"color": "#0072B2", "marker": "o"}
SPARSE: Style = {"color": "#D55E00", "marker": "D"}
THIRD: Style = {"color": "#009E73", "marker": "^"}
OTHER: Style = {"color": "0.45", "marker": "s", "linestyle": ":"}

# The background of a map, where there is no value.
_ABSENT = "0.88"
_MAX_COLUMNS = 1024


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure, in inches, and its panels side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False).flat)


def open_axes(axes: Axes, legend: bool = False) -> None:
    """Draw faint grid lines below a curve, and no frame above and to the right."""
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)


def use_lengths(axes: Axes, lengths: Iterable[int], label: str = "prompt (tokens)") -> None:
    """Make the x axis one of lengths, a tick each."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{n:,}" if n % 1024 else f"{n // 1024}k" for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def save_figure(figure: Figure, path: File, finding: str, measured: str = "") -> Figure:
    """Write a figure into a .png, .svg or .pdf file, whole or not at all."""
    figure.suptitle(finding, fontsize=11, wrap=True)
    figure.supxlabel(measured, fontsize=7.5, color="0.35", wrap=True)
    with replaced_file(path) as scratch:
        figure.savefig(scratch, dpi=150)
    return figure


def plot_ablation(frame: pd.DataFrame, path: File) -> Figure:
    """Draw the perplexity of each setting above dense against its attention flops.

    Of several texts both are means, with the standard error of the difference as the bar. A line
    joins the settings that no other one beats in both. These and presets are numbered, and named
    above: as a preset, or by the changes to the closest one. Where every combination of some L and
    H is there on one text, and nothing else varies, a heat map of the mean KL is drawn instead.
    Takes a table of `run_ablation`.
    """
    if frame.empty:
        raise ValueError("frame must hold at least one row, got none")
    # Perplexities are of one text if all of these are equal.
    names = ["model", "dtype", "dataset", "windows", "context", "text_source"]
    texts = frame.groupby(names, dropna=False).ngroups
    size = frame["local_window"].nunique() * frame["heavy_budget"].nunique()
    grid = varied_settings(frame) == ["local_window", "heavy_budget"]
    figure, (axes,) = new_figure(7.2, 5.2)
    if grid and (texts, len(frame)) == (1, size):
        finding = _draw_grid(axes, frame)
    else:
        finding = _draw_points(axes, frame, texts)
    same = [f"{n} {frame[n].iloc[0]}" for n in names[:-1] if frame[n].nunique(dropna=False) == 1]
    return save_figure(figure, path, finding, ", ".join(same))


def _draw_points(axes: Axes, frame: pd.DataFrame, texts: int) -> str:
    cells = frame.assign(flops=100 / frame["attention_flops_ratio"], name=presets(frame))
    points = cells.groupby(FIELDS, sort=False, dropna=False, as_index=False).agg(
        flops=("flops", "mean"),
        loss=("delta_percent", "mean"),
        error=("stderr_percent", lambda errors: math.hypot(*errors) / len(errors)),
        texts=("flops", "size"),
        name=("name", "first"),
        preset=("preset", "first"),
    )
    axes.axhline(0, color=DENSE["color"], label="dense")
    style: Style = {"color": SPARSE["color"], "markersize": 4, "elinewidth": 0.8}
    label = "sparse" if texts == 1 else f"sparse, mean of {texts} texts"
    label += "; bars: standard errors"
    axes.errorbar(points["flops"], points["loss"], points["error"], fmt="o", label=label, **style)
    best = front(points)
    axes.plot(best["flops"], best["loss"], color="0.5", lw=0.8, zorder=0)
    names = points["name"].fillna(best["preset"])
    missing = points["texts"].map(lambda n: "" if n == texts else f" ({n} of {texts} texts)")
    named = points.assign(name=names + missing).dropna(subset="name")
    for number, (flops, loss) in enumerate(zip(named["flops"], named["loss"], strict=True), 1):
        # Not on the line of dense.
        place, side = ((5, -3), "top") if loss < 0 else ((5, 3), "bottom")
        options: Style = {"textcoords": "offset points", "fontsize": 8, "va": side}
        axes.annotate(str(number), (flops, loss), xytext=place, **options)
    described = "\n".join(f"{number}: {name}" for number, name in enumerate(named["name"], 1))
    axes.set_title(described, fontsize=7.5, loc="left")
    axes.set(xlabel="attention flops (% of dense)", ylabel="perplexity above dense (%)")
    open_axes(axes, legend=True)
    last = best.iloc[-1]
    finding = f"Least loss: {named['name'][last.name]}, {last['loss']:+.2f} %"
    return f"{finding} for {last['flops']:.0f} % of the flops"


def _draw_grid(axes: Axes, rows: pd.DataFrame) -> str:
    rows = rows.assign(share=100 / rows["attention_flops_ratio"])
    form = "{delta_percent:+.2f} %\n{kl_mean:.4f}\n{share:.0f} % flops"
    texts = pd.Series([form.format_map(row) for row in rows.to_dict("records")], rows.index)
    rows["text"] = (presets(rows) + "\n").fillna("") + texts
    cells = rows.pivot(index="heavy_budget", columns="local_window")
    color = np.maximum(cells["kl_mean"].to_numpy(), 1e-9)  # 0 has no logarithm
    axes.imshow(color, cmap="YlOrRd", norm=LogNorm(), origin="lower", aspect="auto")
    _write_cells(axes, cells["text"], color > color.min() ** 0.4 * color.max() ** 0.6)
    budgets, windows = cells["kl_mean"].axes
    axes.set_xticks(range(len(windows)), map(str, windows))
    axes.set_yticks(range(len(budgets)), map(str, budgets))
    axes.set(xlabel="local window L (tokens)", ylabel="heavy budget H (tokens)")
    cell = "a cell: perplexity above dense; mean KL, nats (colour); attention flops of dense"
    axes.set_title(cell, fontsize=8)
    ordered = rows.sort_values(["heavy_budget", "local_window"]).iloc[[0, -1]]
    ends = (
        f"KL {row.kl_mean:.4f} for {row.share:.0f} % of the flops" for row in ordered.itertuples()
    )
    return "Smallest sets: {}; largest: {}".format(*ends)


def front(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other point beats in both `flops` and `loss`, by rising flops."""
    ordered = points.sort_values(["flops", "loss"])
    return ordered[ordered["loss"] < ordered["loss"].cummin().shift(fill_value=math.inf)]


def visualize_attention_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    output_dir: File = "benchmark_results/attention_heatmaps",
    figure_format: str = "png",
    *,
    title: str = "",
    on_progress: Progress | None = None,
) -> AttentionMeasures:
    """Draw which positions the memory sets of a prompt contain, and the sparse attention's error.

    `memory.png` shows which positions the KV heads of each layer hold at the end; `errors.png` the
    error of each layer and head against dense attention, and the share of the dense softmax that
    falls on visible keys. Other arguments and errors are as of `measure_attention`.

    Parameters
    ----------
    output_dir, figure_format : path, str
        Folder for the figures, created if necessary, and "png", "svg" or "pdf".
    title : str
        Description of the run, for the figures.
    """
    folder = output_folder(output_dir, "output_dir")
    if f".{figure_format}" not in SUFFIXES:
        formats = ", ".join(suffix[1:] for suffix in SUFFIXES)
        raise ValueError(f"figure_format must be one of {formats}, got {figure_format!r}")
    measures = measure_attention(model, input_ids, chunk_config, on_progress=on_progress)
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in ATTENTION_FIGURES.items():
        plot(measures, folder / f"{name}.{figure_format}", title)
    return measures


def plot_memory_sets(measures: AttentionMeasures, path: File, title: str) -> Figure:
    """Draw which positions the KV heads of each layer hold after the last chunk."""
    ends, window = measures.chunk_ends, measures.config.local_window
    share = measures.head_share(len(ends) - 1)
    figure, (axes,) = new_figure(9.6, _map_height(share))
    local = "; black at the end: local window" if window else ""
    label = f"position (tokens); dotted: chunks{local}"
    columns = adaptive_max_pool1d(share, min(ends[-1], _MAX_COLUMNS)).numpy()
    # A colour for each share that is possible, and nothing between.
    heads = math.lcm(*measures.kv_heads)
    image = _draw_map(
        axes,
        columns,
        measures.layers,
        label,
        cmap=colormaps["magma_r"].resampled(heads + 1),
        extent=(0, ends[-1], -0.5, len(share) - 0.5),
        vmin=-0.5 / heads,
        vmax=1 + 0.5 / heads,
    )
    for boundary in ends[:-1]:
        axes.axvline(boundary, color="0.35", linewidth=0.8, linestyle=":")
    label = "share of KV heads that hold it (columns of several positions: the most)"
    ticks = np.arange(heads + 1) / heads if heads <= 16 else None
    figure.colorbar(image, ax=axes, label=label, aspect=30, ticks=ticks, format="%.2g")
    earlier = share[:, : max(0, ends[-1] - window)]
    mean = 100 * earlier[earlier > 0].mean()
    finding = f"a key that a layer still holds at the end is held by {mean:.0f} % of its KV heads"
    return save_figure(figure, path, f"{_settings(measures)}: {finding}", title)


def plot_errors(measures: AttentionMeasures, path: File, title: str) -> Figure:
    """Draw the error and the recalled softmax mass of every layer and query head."""
    error, seen = (
        pd.DataFrame(100 * values.numpy(), index=measures.layers)
        for values in (measures.l1_error, measures.mass_recall)
    )
    figure, panels = new_figure(9.6, _map_height(error), 2)
    # Dark is worse in both maps.
    for axes, values, what, style in (
        (panels[0], error, "relative L1 error of the output (%)", {"cmap": "YlOrRd"}),
        (
            panels[1],
            seen,
            "dense softmax mass on visible keys (%)",
            {"cmap": "YlOrRd_r", "vmin": None, "vmax": 100},
        ),
    ):
        image = _draw_map(axes, values, measures.layers, "query head", what, **style)
        axes.locator_params(axis="x", integer=True)
        figure.colorbar(image, ax=axes, aspect=40, pad=0.01)
    layer, head = error.stack().idxmax()
    finding = f"{_settings(measures)}: head {head} of layer {layer} errs most, by "
    finding += f"{error.loc[layer, head]:.1f} %; the mean is {np.nanmean(error):.1f} %"
    return save_figure(figure, path, finding, title)


def _settings(measures: AttentionMeasures) -> str:
    return f"{measures.config.to_string()}, S = {measures.config.chunk_size:,}"


ATTENTION_FIGURES = {"memory": plot_memory_sets, "errors": plot_errors}


def _draw_map(
    axes: Axes, values: Any, layers: Sequence[int], label: str, title: str = "", **style: Any
) -> AxesImage:
    """Draw rows of values, one for each layer; grey shows where there is none."""
    usual: Style = {"origin": "lower", "aspect": "auto", "interpolation": "nearest", "vmin": 0}
    image = axes.imshow(values, **(usual | style))
    axes.set_facecolor(_ABSENT)
    axes.set_title(title, fontsize=9)
    # At most 16 layers have their names.
    step = next(n for n in (1, 2, 5, 10, 20, 50, len(layers)) if len(layers) <= 16 * n)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set(xlabel=label, ylabel="layer")
    return image


def _write_cells(axes: Axes, texts: pd.DataFrame, dark: Any) -> None:
    """Write a text into each cell of a map, white where it is dark."""
    for (row, column), text in np.ndenumerate(texts.to_numpy()):
        color = "white" if dark[row, column] else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)


def _map_height(layers: Sized) -> float:
    return 1.8 + min(9.0, max(2.0, 0.17 * len(layers)))
