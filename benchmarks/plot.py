"""Draws a picture of each finding from the JSON files of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from common.benchmark import RESULTS, new_app
from common.report import Row, read_report
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from h2o_prefill.eval.plots import (
    DENSE,
    OTHER,
    SPARSE,
    THIRD,
    Style,
    new_figure,
    open_axes,
    save_figure,
    use_lengths,
)

app = new_app()

# Of SmolLM2 and Llama 3, in float32 and bfloat16.
SHAPES = ("#F0A868", "#D55E00", "#7FC4A8", "#009E73")
# Variants of a model, their labels and colours.
VARIANTS = {
    "dense": ("dense", DENSE["color"]),
    "sparse": ("sparse", SPARSE["color"]),
    "no_attention": ("without attention", "0.7"),
}
# Lines of memory: field, label and style.
MEMORY = {
    "kv_megabytes": ("KV cache", OTHER),
    "workspace_megabytes": ("workspace, sparse", SPARSE),
    "dense_workspace_megabytes": ("workspace, SDPA", DENSE),
    "state_megabytes": ("scores + memory set", THIRD),
}
# Forms of linear attention, by what their fields begin with: label and style.
FORMS = {
    "": ("linear attention", SPARSE),
    "sdpa_": ("SDPA", DENSE),
    "square_": ("masked square", THIRD),
    "cumsum_": ("cumulative sums", {"color": "#CC79A7", "marker": "v"}),
    "fla_": ("flash-linear-attention", OTHER),
}
# Programs beside each other.
PROGRAMS = {"h2o_prefill": SPARSE, "openvino": DENSE}


@app.command()
def main(
    results: Annotated[
        Path, typer.Option("--results", metavar="FOLDER", help="Where the JSON files are.")
    ] = RESULTS,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Where the pictures go. Default: there."),
    ] = None,
) -> None:
    """Draw the pictures whose JSON files are there."""
    drawn = []
    for picture, (names, draw) in PICTURES.items():
        files = [results / f"{name}.json" for name in names]
        if all(file.is_file() for file in files):
            path = (output or results) / picture
            drawn.append(draw(*map(read_report, files), path))
            typer.echo(path)
    if not drawn:
        names = sorted(f"{name}.json" for names, _ in PICTURES.values() for name in names)
        raise typer.BadParameter(f"--results must hold some of {', '.join(names)}: {results}")


def draw_throughput(prefill: Row, model: Row, path: Path) -> Path:
    """Draw how many times as fast as SDPA a layer's attention is, and a whole model's rates."""
    figure, (layer, whole) = new_figure(9.6, 4.2, 2)
    layers = _by_shape(prefill)
    for color, (name, rows) in zip(SHAPES, layers.items(), strict=False):
        _draw(layer, rows, "speedup", name, {**SPARSE, "color": color})
    most = max(layers.values(), key=len)
    _draw(layer, most, "flop_ratio", "fewer query-key products", OTHER)
    use_lengths(layer, _lengths(most))
    _use_numbers(layer, "times as fast as SDPA, one layer")
    layer.legend(frameon=False, fontsize=8)
    rows = model["results"]
    lengths = sorted({row["length"] for row in rows})
    for place, (variant, (label, color)) in enumerate(VARIANTS.items()):
        rates = {row["length"]: row for row in rows if row["variant"] == variant}
        heights = [rates[length]["tokens_per_second"] for length in lengths]
        places = np.arange(len(lengths)) + 0.27 * (place - 1)
        bars = whole.bar(places, heights, 0.27, color=color, label=label)
        times = [f"{rates[length]['speedup']:.1f}x" for length in lengths]
        whole.bar_label(bars, times, fontsize=8)
    whole.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    whole.set(xlabel="prompt (tokens)", ylabel=f"tokens / s, all of {model['config']['model']}")
    whole.set_ylim(0, 1.3 * whole.get_ylim()[1])
    whole.legend(frameon=False, fontsize=8, ncols=3)
    open_axes(whole)
    fastest = max(row["speedup"] for shape in layers.values() for row in shape)
    gain = max(row["speedup"] for row in rows if row["variant"] == "sparse")
    finding = f"One layer's attention is up to {fastest:.0f}x as fast as SDPA"
    return _save(figure, path, f"{finding}, a whole prefill {gain:.1f}x as fast as dense", prefill)


def draw_memory(report: Row, path: Path) -> Path:
    """Draw memory by prompt length for the last shape."""
    sizes = {**report, "results": [row for row in report["results"] if "length" in row]}
    name, rows = list(_by_shape(sizes).items())[-1]
    figure, (axes,) = new_figure(7.2, 4.2)
    for field, (label, style) in MEMORY.items():
        _draw(axes, rows, field, label, style)
    use_lengths(axes, _lengths(rows))
    _use_numbers(axes, f"MB, one layer of {name}")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    last = rows[-1]
    finding = f"{last['length']:,} tokens: scores and memory set add {last['state_percent']:.1f} %"
    return _save(figure, path, f"{finding} to the KV cache", report)


def draw_linear(report: Row, path: Path) -> Path:
    """Draw time and temporary memory by length, for the first shape and dtype."""
    name, rows = next(iter(_by_shape(report).items()))
    rows = [row for row in rows if not row.get("swept")]
    figure, (time, memory) = new_figure(9.6, 4.2, 2)
    for axes, unit, label in (
        (time, "milliseconds", "time (ms)"),
        (memory, "megabytes", "memory beside the results (MB)"),
    ):
        for form, (what, style) in FORMS.items():
            field = "temporary_megabytes" if form + unit == "megabytes" else form + unit
            _draw(axes, [row for row in rows if row.get(field)], field, what, style)
        use_lengths(axes, _lengths(rows), "sequence (tokens)")
        _use_numbers(axes, label)
    time.legend(frameon=False, fontsize=8)
    beside = max((row for row in rows if "speedup" in row), key=lambda row: row["length"])
    finding = f"Linear attention of {beside['length']:,} tokens is {beside['speedup']:.0f}x as fast"
    return _save(figure, path, f"{finding} as SDPA (one layer of {name})", report)


def draw_peers(report: Row, path: Path) -> Path:
    """Draw the seconds of the longest prompt in every mode of every program, and what it loses."""
    length = max(row["length"] for row in report["results"])
    rows = [row for row in report["results"] if "variant" in row and row["length"] == length]
    rows.sort(key=lambda row: -row["seconds"])
    figure, (axes,) = new_figure(9.6, 0.3 * len(rows) + 1.4)
    colors = [PROGRAMS.get(row["program"], OTHER)["color"] for row in rows]
    bars = axes.barh([row["variant"] for row in rows], [x["seconds"] for x in rows], color=colors)
    axes.bar_label(bars, [f"{row['seconds']:.1f} s, {_lost(row)}" for row in rows], padding=4)
    axes.set(xlabel="prefill (s), less is better", ylabel="program, mode")
    axes.set_xlim(0, 1.3 * rows[0]["seconds"])
    open_axes(axes)
    axes.grid(axis="y", visible=False)
    ours = next(row for row in reversed(rows) if row["program"] == "h2o_prefill")
    peer = next(row for row in reversed(rows) if row["program"] != "h2o_prefill")
    finding = f"{length:,} tokens: {ours['variant']} takes {ours['seconds']:.1f} s, the fastest "
    finding += f"other, {peer['variant']}, {peer['seconds']:.1f} s"
    model = report["config"]["model"].split(".")[0]
    measured = f"{model}; loss (of perplexity) and KL (estimated, nats): against the dense mode of "
    measured += "the same program, for h2o_prefill against transformers"
    return _save(figure, path, finding, report, measured)


def draw_peers_memory(report: Row, path: Path) -> Path:
    """Draw the seconds of the shortest prompt and the most memory of each program's process."""
    rows = [row for row in report["results"] if "peak_megabytes" in row]
    figure, (axes,) = new_figure(9.6, 5.4)
    right = 1.1 * max(row["seconds"] for row in rows)
    top = 1.05 * max(row["peak_megabytes"] for row in rows)
    # Names in a column, none over another.
    height = 0.0
    for row in sorted(rows, key=lambda row: row["peak_megabytes"]):
        point, color = (row["seconds"], row["peak_megabytes"]), PROGRAMS.get(row["program"], OTHER)
        height = max(height + top / 32, row["peak_megabytes"])
        axes.plot(*point, "o", color=color["color"])
        line = {"arrowstyle": "-", "color": "0.8", "relpos": (0, 0.5)}
        axes.annotate(row["variant"], point, (right, height), arrowprops=line, va="center")
    axes.set(xlabel="prefill (s), less is better", ylabel="most memory of the process (MB)")
    axes.set(xlim=(0, 1.5 * right), ylim=(0, max(top, height)))
    open_axes(axes)
    least = min(rows, key=lambda row: row["peak_megabytes"])
    finding = f"{least['length']:,} tokens: {least['variant']} needs the least memory, "
    finding += f"{least['peak_megabytes']:,.0f} MB"
    return _save(figure, path, finding, report)


def _lost(row: Row) -> str:
    if not row.get("kl_estimate"):
        return "dense"
    return f"loss {row['delta_percent']:+.2f} %, KL {row['kl_estimate']:.4f}"


def draw_scale(report: Row, path: Path) -> Path:
    """Draw the simulated efficiency of stages by their number."""
    rows = [row for row in report["results"] if "layers_efficiency_percent" in row]
    lengths = sorted({row["length"] for row in rows})
    length = lengths[len(lengths) // 2]
    rows = [row for row in rows if row["length"] == length]
    ranks = [row["ranks"] for row in rows]
    percent = [row["layers_efficiency_percent"] for row in rows]
    figure, (axes,) = new_figure(6, 4)
    axes.plot(ranks, percent, **SPARSE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, map(str, ranks))
    axes.set(xlabel="processes", ylabel="efficiency (%), simulated", ylim=(0, 105))
    open_axes(axes)
    finding = f"{length:,} tokens on {ranks[-1]} processes: {percent[-1]:.0f} % efficiency"
    return _save(figure, path, finding, report)


def draw_crossover(report: Row, path: Path) -> Path:
    """Draw how fast the attention that min_prefill=auto chooses is, beside dense attention."""
    frame = pd.DataFrame(report["results"])
    frame["case"] = frame["preset"] + ", " + frame["model"] + ", " + frame["dtype"]
    wide = frame.pivot(index="case", columns="length", values="speedup")
    sparse = frame.pivot(index="case", columns="length", values="chosen") == "sparse"
    figure, (axes,) = new_figure(9.6, 0.35 * len(wide) + 1.4)
    axes.imshow(np.log2(wide), cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
    for (row, column), value in np.ndenumerate(wide.to_numpy()):
        if not np.isnan(value):
            weight = "bold" if sparse.iat[row, column] else "normal"
            style = {"weight": weight, "color": "white" if value > 3 else "black", "fontsize": 7}
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", **style)
    axes.set_xticks(range(wide.shape[1]), [f"{x:,}" for x in wide.columns], fontsize=7)
    axes.set_yticks(range(len(wide)), list(wide.index), fontsize=8)
    label = "prompt (tokens); bold: sparse attention was chosen"
    axes.set(xlabel=label, ylabel="preset, shape, dtype")
    least, most = frame["speedup"].min(), frame["speedup"].max()
    finding = f"The attention chosen is {least:.2f} to {most:.1f} times as fast as dense attention"
    return _save(figure, path, finding, report)


PICTURES = {
    "throughput_comparison.png": (("prefill", "model"), draw_throughput),
    "crossover.png": (("crossover",), draw_crossover),
    "memory_profile.png": (("allocations",), draw_memory),
    "linear.png": (("linear",), draw_linear),
    "peers.png": (("peers",), draw_peers),
    "peers_memory.png": (("peers_avx2_4096",), draw_peers_memory),
    "scale.png": (("simulate",), draw_scale),
}


def _by_shape(report: Row) -> dict[str, list[Row]]:
    """Return the rows by shape and dtype: those with the most threads, without short prompts."""
    shapes: dict[str, list[Row]] = {}
    most = max(row.get("threads", 0) for row in report["results"])
    longest = max(row["length"] for row in report["results"])
    for row in report["results"]:
        if row.get("threads", most) == most and row["length"] >= min(256, longest):
            shapes.setdefault(f"{row['model']}, {row['dtype']}", []).append(row)
    return shapes


def _draw(axes: Axes, rows: list[Row], field: str, label: str, style: Style) -> None:
    if rows:
        points = [row["length"] for row in rows], [row[field] for row in rows]
        axes.plot(*points, label=label, markersize=4, **style)


def _lengths(rows: list[Row]) -> set[int]:
    return {row["length"] for row in rows}


def _use_numbers(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel(label)
    open_axes(axes)


def _save(figure: Figure, path: Path, finding: str, report: Row, measured: str = "") -> Path:
    """Write a picture, with what was measured and the machine below it; return the file."""
    facts = report["environment"]
    threads = max(row.get("threads", 0) for row in report["results"])
    machine = f"{facts['cpu']}, {facts['library']['cpu_isa_used']}, torch {facts['torch']}"
    machine += f", {threads} threads" if threads else ""
    quick = " (quick: the figures mean nothing)" if report["quick"] else ""
    save_figure(figure, path, finding + quick, f"{measured or report['title']}\n{machine}")
    return path


if __name__ == "__main__":
    app()
