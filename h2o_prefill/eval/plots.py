"""The figures of evaluations: the title says what was found, the line below what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation_table import FIELDS, short_value, varied_settings
from h2o_prefill.eval.attention import AttentionMeasures, measure_attention
from h2o_prefill.eval.calibration import FACTORS, HeadCalibration
from h2o_prefill.eval.perplexity import PerplexityResult
from h2o_prefill.eval.retrieval import RetrievalResult
from h2o_prefill.generation.runs import DENSE as DENSE_RUN
from h2o_prefill.generation.runs import Progress
from h2o_prefill.presets import PRESETS
from h2o_prefill.selection import SelectionRule

if TYPE_CHECKING:
    import pandas as pd

File = str | os.PathLike[str]
Style = dict[str, Any]

SUFFIXES = (".png", ".svg", ".pdf")
ATTENTION_FIGURES = ("memory", "errors", "stability", "attention")

# Told apart by people who see colours differently, and by marker and line style in print.
DENSE: Style = {"color": "#0072B2", "marker": "o"}
SPARSE: Style = {"color": "#D55E00", "marker": "D"}
THIRD: Style = {"color": "#009E73", "marker": "^"}
OTHER: Style = {"color": "0.45", "marker": "s", "linestyle": ":"}

# The background of a map shows where there is no value.
_MAP: Style = {"origin": "lower", "aspect": "auto", "interpolation": "nearest"}
_ABSENT = "0.88"
_MAX_COLUMNS = 1024
_MAX_NUMBERED_CELLS = 300
_LETTERS = {"chunk_size": "S", "local_window": "L", "heavy_budget": "H", "sink_tokens": "K"}


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure, in inches, and its panels side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False).flat)


def open_axes(axes: Axes) -> None:
    """Draw faint grid lines behind a curve, and no frame above and to the right."""
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, path: File, finding: str, measured: str = "") -> Figure:
    """Write a figure into a .png, .svg or .pdf file, whole or not at all."""
    figure.suptitle(finding, fontsize=11, wrap=True)
    figure.supxlabel(measured, fontsize=7.5, color="0.35", wrap=True)
    with replaced_file(path) as scratch:
        figure.savefig(scratch, dpi=150)
    return figure


def plot_perplexity(result: PerplexityResult, path: File, title: str = "") -> Figure:
    """Draw how far perplexity is above dense along the window, and along the average chunk."""
    figure, (window, chunk) = new_figure(9.6, 3.8, 2)
    size = result.config.chunk_size
    for axes, curve, length in (
        (window, result.by_position, result.context),
        (chunk, result.by_chunk_position, size),
    ):
        # None becomes NaN.
        dense, sparse = (np.array(values, dtype=float) for values in (curve.dense, curve.sparse))
        edges = [*curve.begin, curve.begin[-1] + curve.width]
        change = 100 * (sparse / dense - 1)
        axes.stairs(change, edges, baseline=0, fill=True, color=SPARSE["color"], alpha=0.6)
        axes.axhline(0, color="0.3", linewidth=0.8)
        axes.set_xlim(0, length)
        axes.set_ylabel("perplexity above dense (%)")
        open_axes(axes)
    for begin in range(size, result.context, size):
        window.axvline(begin, color="0.5", linewidth=0.8, linestyle=":", zorder=0)
    window.set_xlabel("position in the window (tokens); dotted: chunks")
    chunk.set_xlabel("position in a chunk (tokens), mean of all but the first")
    known = "" if math.isnan(result.stderr_percent) else f" ± {result.stderr_percent:.2f}"
    ppl = f"Perplexity {result.sparse.ppl:.3f} sparse, {result.dense.ppl:.3f} dense"
    return save_figure(figure, path, f"{ppl}: {result.delta_percent:+.2f} %{known}", title)


def plot_ablation(frame: pd.DataFrame, path: File) -> Figure:
    """Draw the perplexity of each setting above dense against its attention flops.

    Of several texts both are means, with the standard error of the difference as the bar. A line
    joins the settings that no other one beats in both; these are numbered, and described above by
    the closest preset; presets have their names. Where every combination of some L and H is there
    on one text, and nothing else varies, a heat map of the mean KL is drawn instead. Takes a table
    of `run_ablation`.
    """
    if frame.empty:
        raise ValueError("frame must hold at least one row, got none")
    # Perplexities are of one text if all of these are equal.
    names = ["model", "dtype", "dataset", "windows", "context", "protocol", "text_source"]
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
    flops: list[float] = []
    loss: list[float] = []
    errors: list[float] = []
    named: list[tuple[str, bool]] = []  # a preset or not
    for _, rows in frame.groupby([*FIELDS, "select"], sort=False, dropna=False):
        row = rows.iloc[0]
        is_preset = isinstance(row["preset"], str)
        missing = "" if len(rows) == texts else f" ({len(rows)} of {texts} texts)"
        flops.append((100 / rows["attention_flops_ratio"]).mean())
        loss.append(rows["delta_percent"].mean())
        errors.append(math.hypot(*rows["stderr_percent"]) / len(rows))
        named.append(((row["preset"] if is_preset else _describe(row)) + missing, is_preset))
    axes.axhline(0, color=DENSE["color"], label="dense")
    style: Style = {"color": SPARSE["color"], "markersize": 4, "elinewidth": 0.8}
    label = "sparse" if texts == 1 else f"sparse, mean of {texts} texts"
    axes.errorbar(flops, loss, errors, fmt="o", label=label, **style)
    best = front(flops, loss)
    axes.plot([flops[i] for i in best], [loss[i] for i in best], color="0.5", lw=0.8, zorder=0)
    described: list[str] = []
    labels: dict[int, str] = {}
    for i, (name, is_preset) in enumerate(named):
        if is_preset:
            labels[i] = name
        elif i in best:
            labels[i] = f"setting {len(described) + 1}"
            described.append(f"{labels[i]}: {name}")
    for i, label in labels.items():
        # Inside the figure, and not on the line of dense.
        right, below = flops[i] > (min(flops) + max(flops)) / 2, loss[i] < 0
        place: Style = {"xytext": (-5 if right else 5, -3 if below else 3), "fontsize": 8}
        place |= {"ha": "right" if right else "left", "va": "top" if below else "bottom"}
        axes.annotate(
            label.removeprefix("setting "), (flops[i], loss[i]), textcoords="offset points", **place
        )
    axes.set(xlabel="attention flops (% of dense)", ylabel="perplexity above dense (%)")
    axes.set_title("\n".join(described), fontsize=7.5, loc="left")
    axes.legend(frameon=False, fontsize=8)
    open_axes(axes)
    i = best[-1]
    return f"Least loss: {labels[i]}, {loss[i]:+.2f} % for {flops[i]:.0f} % of the flops"


def _draw_grid(axes: Axes, rows: pd.DataFrame) -> str:
    names = ("kl_mean", "delta_percent", "attention_flops_ratio", "preset")
    kl, loss, ratio, presets = (
        rows.pivot(index="heavy_budget", columns="local_window", values=name).to_numpy()
        for name in names
    )
    coloured = np.maximum(kl.astype(float), 1e-9)  # 0 has no logarithm
    dark = coloured.min() ** 0.4 * coloured.max() ** 0.6
    axes.imshow(coloured, cmap="YlOrRd", norm=LogNorm(), origin="lower", aspect="auto")
    shares = 100 / ratio.astype(float)
    for (row, column), value in np.ndenumerate(kl):
        preset = presets[row, column]
        text = f"{preset}\n" if isinstance(preset, str) else ""
        text += f"{loss[row, column]:+.2f} %\n{value:.4f}\n{shares[row, column]:.0f} % flops"
        color = "white" if value > dark else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    windows, budgets = (sorted(rows[name].unique()) for name in ("local_window", "heavy_budget"))
    axes.set_xticks(range(len(windows)), map(str, windows))
    axes.set_yticks(range(len(budgets)), map(str, budgets))
    axes.set(xlabel="local window L (tokens)", ylabel="heavy budget H (tokens)")
    cell = "a cell: perplexity above dense; mean KL, nats (colour); attention flops of dense"
    axes.set_title(cell, fontsize=8)
    ends = (f"KL {kl[i, i]:.4f} for {shares[i, i]:.0f} % of the flops" for i in (0, -1))
    return "Smallest sets: {}; largest: {}".format(*ends)


def front(flops: Sequence[float], loss: Sequence[float]) -> list[int]:
    """Return the points that no other point beats in both, by rising flops."""
    chosen: list[int] = []
    for index in sorted(range(len(flops)), key=lambda i: (flops[i], loss[i])):
        if not chosen or loss[index] < loss[chosen[-1]]:
            chosen.append(index)
    return chosen


def _describe(row: pd.Series[Any]) -> str:
    """Return the closest preset with its changes; those of recall have no effect without it."""
    texts = []
    for preset, config in PRESETS.items():
        changed = [n for n in FIELDS if short_value(row[n]) != short_value(getattr(config, n))]
        shown = [n for n in changed if row["recall"] or not n.startswith("recall_")]
        changes = (f"{_LETTERS.get(n, n)}={short_value(row[n])}" for n in shown)
        texts.append(" ".join([preset, *changes]))
    return min(texts, key=len)


def plot_throughput(frame: pd.DataFrame, path: File, title: str = "") -> Figure:
    """Draw tokens per second, dense and sparse, and their ratio beside that of attention flops."""
    figure, (rate, ratio) = new_figure(9.6, 4.2, 2)
    ticks = range(len(frame))
    for name, style in (("dense", DENSE), ("sparse", SPARSE)):
        rate.plot(ticks, frame[f"{name}_tokens_per_second"], label=name, **style)
    rate.set_ylabel("tokens / s (higher is better)")
    speedup = frame["speedup"]
    spread = [speedup - frame["speedup_min"], frame["speedup_max"] - speedup]
    label = "speed-up (bars: lowest and highest round)"
    ratio.errorbar(ticks, speedup, spread, capsize=3, label=label, **SPARSE)
    flops = frame["attention_flops_ratio"]
    ratio.plot(ticks, flops, label="attention flops, dense / sparse", **OTHER)
    ratio.axhline(1, color="0.3", linewidth=0.8)
    ratio.set_ylabel("sparse beside dense (times)")
    for axes in (rate, ratio):
        _use_lengths(axes, frame)
        axes.legend(frameon=False, fontsize=8)
    last = frame.iloc[-1]
    finding = f"sparse is {last['speedup']:.2f} times as fast as dense"
    return save_figure(figure, path, f"{last['seq_length']:,.0f} tokens: {finding}", title)


def plot_memory_profile(frame: pd.DataFrame, path: File, title: str = "") -> Figure:
    """Draw the peak memory of a prefill without the weights, and its components."""
    figure, (axes,) = new_figure(7.2, 4.4)
    kept, added = frame["kv_cache_bytes"] / 1e6, frame["state_bytes"] / 1e6
    dense, sparse = frame["dense_peak_bytes"] / 1e6, frame["sparse_peak_bytes"] / 1e6
    width = 0.36
    for shift, low, high, color, label in (
        (-width / 2, 0 * kept, kept, "0.7", "KV cache"),
        (width / 2, 0 * kept, kept, "0.7", None),
        (-width / 2, kept, dense, DENSE["color"], "dense: activations, workspace"),
        (width / 2, kept, kept + added, THIRD["color"], "sparse: scores and memory sets"),
        (width / 2, kept + added, sparse, SPARSE["color"], "sparse: activations, workspace"),
    ):
        axes.bar(np.arange(len(frame)) + shift, high - low, width, low, color=color, label=label)
    axes.set_ylabel("peak of a prefill beside the weights (MB)")
    _use_lengths(axes, frame)
    axes.legend(frameon=False, fontsize=8, reverse=True, loc="upper left")
    share, length = 100 * added.iloc[-1] / kept.iloc[-1], frame["seq_length"].iloc[-1]
    finding = f"{length:,} tokens: scores and memory sets add {share:.1f} % to the KV cache"
    return save_figure(figure, path, finding, title)


def _use_lengths(axes: Axes, frame: pd.DataFrame) -> None:
    axes.set_xticks(range(len(frame)), [f"{length:,}" for length in frame["seq_length"]])
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    open_axes(axes)


def plot_retrieval(result: RetrievalResult, path: File, title: str = "") -> Figure:
    """Draw the mean score as a map: tasks and depths by prefill and length."""
    import pandas as pd

    runs = [DENSE_RUN, *result.variants]
    frame = pd.DataFrame(
        {"task": o.task, "length": o.length, "depth": o.depth, **o.scores} for o in result.outcomes
    )
    maps = {run: frame.pivot_table(run, ["task", "depth"], "length", sort=False) for run in runs}
    scores = pd.concat(maps, axis=1)
    rows, columns = scores.shape
    lengths, depths = columns // len(runs), rows // frame["task"].nunique()
    figure, (axes,) = new_figure(2.5 + 0.7 * columns, 1.8 + 0.3 * rows)
    axes.imshow(scores, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for (y, x), score in np.ndenumerate(scores.to_numpy()):
        color = "black" if score > 0.5 else "white"
        axes.text(x, y, f"{score:.2g}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(columns), [str(length) for _, length in scores.columns])
    axes.set_yticks(range(rows), [f"{task}, {depth:g} %" for task, depth in scores.index])
    axes.set(xlabel="tokens", ylabel="task, depth of the needle")
    for column in range(lengths, columns, lengths):
        axes.axvline(column - 0.5, color="white", linewidth=3)
    for row in range(depths, rows, depths):
        axes.axhline(row - 0.5, color="white", linewidth=3)
    above = axes.secondary_xaxis("top")
    middles = [lengths * (index + 0.5) - 0.5 for index in range(len(runs))]
    # Names of variants can be longer than their columns are wide.
    above.set_xticks(middles, [run.replace(",", ",\n") for run in runs], fontsize=8)
    above.tick_params(length=0)
    dense, *sparse = (100 * frame[run].mean() for run in runs)
    shares = " to ".join(f"{share:.0f} %" for share in sorted({min(sparse), max(sparse)}))
    finding = f"Mean score: dense {dense:.0f} %, sparse {shares}" if sparse else "Mean score"
    return save_figure(figure, path, finding, title)


def plot_calibration(result: HeadCalibration, path: File, title: str) -> Figure:
    """Draw the error of every layer and KV head, and the factors chosen."""
    layers = tuple(result.errors)
    shape = len(layers), max(len(heads) for heads in result.errors.values())
    error, factor = np.full(shape, np.nan), np.full(shape, np.nan)
    for row, layer in enumerate(layers):
        error[row, : len(result.errors[layer])] = [1e6 * head[0] for head in result.errors[layer]]
        factor[row, : len(result.factors[layer])] = result.factors[layer]
    figure, (left, right) = new_figure(9.6, _map_height(layers), 2)
    worst = max(1.0, np.nanmax(error))
    style: Style = {"form": ".0f", "cmap": "YlOrRd"}
    _head_map(left, error, layers, 0.55 * worst, vmin=0, vmax=worst, **style)
    left.set_title("error, millionths of the residual", fontsize=9)
    _head_map(right, factor, layers, 0.55 * FACTORS[-1], vmin=1, vmax=FACTORS[-1], **style)
    right.set_title("factor of L and H", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("KV head")
    heads = sum(map(len, result.factors.values()))
    finding = f"{len(result.chosen)} of {heads} KV heads get larger sets"
    if result.error_before:
        finding += f": error {100 * (result.error_after / result.error_before - 1):+.0f} %"
    return save_figure(figure, path, finding, title)


def visualize_attention_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    output_dir: File = "benchmark_results/attention_heatmaps",
    figure_format: str = "png",
    *,
    title: str = "",
    select: SelectionRule | None = None,
    on_progress: Progress | None = None,
) -> AttentionMeasures:
    """Draw which positions the memory sets of a prompt contain, and the sparse attention's error.

    `memory.png` shows which positions the KV heads of each layer hold at the end; `errors.png` the
    error of each layer and head against dense attention, and the share of the dense softmax that
    falls on visible keys; `stability.png` how much the heavy hitters of a layer change from chunk
    to chunk and differ between layers; `attention.png` the dense softmax of the two layers where
    sparse attention errs least and most.

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
    """
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {str(folder)!r}")
    if f".{figure_format}" not in SUFFIXES:
        formats = ", ".join(suffix[1:] for suffix in SUFFIXES)
        raise ValueError(f"figure_format must be one of {formats}, got {figure_format!r}")
    measures = measure_attention(
        model, input_ids, chunk_config, select=select, on_progress=on_progress
    )
    folder.mkdir(parents=True, exist_ok=True)
    plots = (plot_memory_sets, plot_errors, plot_stability, plot_attention)
    for name, plot in zip(ATTENTION_FIGURES, plots, strict=True):
        plot(measures, folder / f"{name}.{figure_format}", title)
    return measures


def plot_memory_sets(measures: AttentionMeasures, path: File, title: str) -> Figure:
    """Draw which positions the KV heads of each layer hold after the last chunk."""
    ends = measures.chunk_ends
    share = measures.head_share(len(ends) - 1)
    figure, (axes,) = new_figure(9.6, _map_height(measures.layers))
    shown = adaptive_avg_pool1d(share, min(ends[-1], _MAX_COLUMNS)).numpy()
    extent = (0, ends[-1], -0.5, len(share) - 0.5)
    image = axes.imshow(shown, extent=extent, cmap="magma_r", vmin=0, vmax=1, **_MAP)
    for boundary in ends[:-1]:
        axes.axvline(boundary, color="0.35", linewidth=0.8, linestyle=":")
    window = measures.config.local_window
    local = "; black at the end: local window" if window else ""
    axes.set_xlabel(f"position (tokens); dotted: chunks{local}")
    _name_layers(axes, measures.layers)
    figure.colorbar(image, ax=axes, label="share of KV heads that hold it", aspect=30)
    earlier = share[:, : max(0, ends[-1] - window)]
    mean = _number(100 * earlier[earlier > 0].mean().item(), ".0f")
    finding = f"A key that a layer still holds at the end is held by {mean} % of its KV heads"
    return save_figure(figure, path, finding, title)


def plot_errors(measures: AttentionMeasures, path: File, title: str) -> Figure:
    """Draw the error and the recalled softmax mass of every layer and query head."""
    layers = measures.layers
    figure, (left, right) = new_figure(9.6, _map_height(layers), 2)
    error, seen = 100 * measures.l1_error.numpy(), 100 * measures.mass_recall.numpy()
    # Dark is worse in both maps, and a run without errors still needs a colour scale.
    worst, least = max(0.1, np.nanmax(error)), min(99.9, np.nanmin(seen))
    _head_map(left, error, layers, 0.55 * worst, cmap="YlOrRd", vmin=0, vmax=worst)
    left.set_title("relative L1 error of the output (%)", fontsize=9)
    _head_map(right, seen, layers, 45 + 0.55 * least, cmap="YlOrRd_r", vmin=least, vmax=100)
    right.set_title("dense softmax mass on visible keys (%)", fontsize=9)
    row, head = divmod(int(np.nanargmax(error)), error.shape[1])
    finding = f"Head {head} of layer {layers[row]} errs most, by {error[row, head]:.1f} %"
    return save_figure(figure, path, f"{finding}; the mean is {np.nanmean(error):.1f} %", title)


def plot_stability(measures: AttentionMeasures, path: File, title: str) -> Figure:
    """Draw Jaccard indices of heavy hitters: of following chunks by layer, and of two layers."""
    figure, (left, right) = new_figure(9.6, _map_height(measures.layers), 2)
    by_chunk = measures.heavy_jaccard.nanmean(-1).T.numpy()
    pairs = measures.heavy_jaccard_of_layers.numpy()
    for axes, values in ((left, by_chunk), (right, pairs)):
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, **_MAP)
        axes.set_facecolor(_ABSENT)
        _name_layers(axes, measures.layers)
    left.set_title("after a chunk and after the one before", fontsize=9)
    left.set_xlabel("chunk")
    left.set_xticks(range(by_chunk.shape[1]), map(str, range(1, by_chunk.shape[1] + 1)))
    right.set_title("of two layers after the last chunk, any KV head", fontsize=9)
    right.set_xlabel("layer")
    right.set_xticks(right.get_yticks(), [tick.get_text() for tick in right.get_yticklabels()])
    figure.colorbar(image, ax=[left, right], label="Jaccard index", aspect=40)
    others = measures.heavy_jaccard_of_layers[~torch.eye(len(pairs), dtype=torch.bool)]
    means = measures.heavy_jaccard.nanmean().item(), others.nanmean().item()
    chunk, layer = (_number(mean, ".2f") for mean in means)
    finding = f"Heavy hitters agree by {chunk} from chunk to chunk, by {layer} in two layers"
    return save_figure(figure, path, finding, title)


def plot_attention(measures: AttentionMeasures, path: File, title: str) -> Figure:
    """Draw the dense softmax of the layers that err least and most, mean of the query heads."""
    error = 100 * measures.l1_error.nanmean(1).nan_to_num()
    rows = list(dict.fromkeys((int(error.argmin()), int(error.argmax()))))
    figure, panels = new_figure(9.6, 4.6, len(rows))
    end = measures.chunk_ends[-1]
    for row, axes in zip(rows, panels, strict=True):
        share = measures.pattern[:, row].nanmean(1).numpy()
        style = {**_MAP, "origin": "upper", "extent": (0, end, end, 0)}
        scale = LogNorm(1e-4, 1, clip=True)
        image = axes.imshow(np.ma.masked_equal(share, 0), cmap="magma_r", norm=scale, **style)
        axes.set_facecolor(_ABSENT)
        axes.set_title(f"layer {measures.layers[row]}", fontsize=9)
        axes.set(xlabel="key (tokens)", ylabel="query (tokens)")
    label = f"share of a query's attention on {-(-end // len(measures.pattern))} keys"
    figure.colorbar(image, ax=panels, label=label, aspect=40)
    named = (f"in layer {measures.layers[row]} ({error[row]:.1f} %)" for row in rows)
    finding = "Dense attention where sparse errs least and most: " + ", ".join(named)
    return save_figure(figure, path, finding, title)


def _head_map(
    axes: Axes,
    values: Any,
    layers: tuple[int, ...],
    middle: float,
    form: str = ".1f",
    **style: Any,
) -> None:
    """Draw [layers, heads]; numbers on the dark side of `middle` are white."""
    image = axes.imshow(values, **style, **_MAP)
    axes.set_facecolor(_ABSENT)
    axes.set_xlabel("query head")
    axes.locator_params(axis="x", integer=True)
    _name_layers(axes, layers)
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


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _map_height(layers: Sequence[int]) -> float:
    return 1.8 + min(9.0, max(2.0, 0.17 * len(layers)))


def _name_layers(axes: Axes, layers: Sequence[int]) -> None:
    """Name the rows of a map, at most 16 of them."""
    step = next(n for n in (1, 2, 5, 10, 20, 50, len(layers)) if len(layers) <= 16 * n)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel("layer")
