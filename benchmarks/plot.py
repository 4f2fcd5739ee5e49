"""Draws the figures of the benchmarks from their JSON files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from common.benchmark import RESULTS, new_app
from common.report import Row, read_report
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from h2o_prefill.eval import plotting

app = new_app()
Style = dict[str, Any]

# Told apart by people who see colours differently, and by line style and marker in print.
BLUE, SKY, ORANGE, GREEN, PINK = "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7"
GREY: Style = {"color": "0.45", "marker": "s", "linestyle": ":"}
DENSE: Style = {"color": BLUE, "marker": "o"}
SPARSE: Style = {"color": ORANGE, "marker": "D"}
BACKWARD: Style = {"linestyle": "--"}
# Variants of a model: label and style.
VARIANTS: dict[str, tuple[str, Style]] = {
    "dense": ("dense", DENSE),
    "dense_chunked": ("dense in chunks", {"color": SKY, "marker": "s", "linestyle": "--"}),
    "exact": ("exact, by our kernel", {"color": GREEN, "marker": "^"}),
    "sparse": ("sparse", SPARSE),
    "no_attention": ("without attention", {"color": "0.45", "marker": None, "linestyle": ":"}),
}
# Lines of memory: field, label and style.
MEMORY: dict[str, tuple[str, Style]] = {
    "kv_megabytes": ("KV cache", {"color": "0.45"}),
    "dense_workspace_megabytes": ("workspace, dense", DENSE),
    "workspace_megabytes": ("workspace, sparse", SPARSE),
    "state_megabytes": ("scores + memory set", {"color": GREEN, "marker": "^"}),
}
# Forms of linear attention, by what their fields begin with: label and style.
FORMS: dict[str, tuple[str, Style]] = {
    "": ("linear attention", SPARSE),
    "both_": ("with its backward", SPARSE | BACKWARD),
    "sdpa_": ("SDPA", DENSE),
    "sdpa_both_": ("SDPA with its backward", DENSE | BACKWARD),
    "square_": ("masked square", {"color": GREEN, "marker": "^"}),
    "cumsum_": ("cumulative sums", {"color": PINK, "marker": "v"}),
    "fla_": ("flash-linear-attention", GREY),
}

# Of a program's modes.
_MARKERS = ["o", "D", "^", "s", "v", "P", "X"]
# By bits of the weights; those of 16 are full, packages half.
_FILLS = {8: "bottom", 4: "none"}
_KL_TICKS = [0, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_SECOND_TICKS = [0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200]


@app.command()
def main(
    results: Annotated[
        Path, typer.Option("--results", metavar="FOLDER", help="Where the JSON files are.")
    ] = RESULTS,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Where the figures go. Default: there."),
    ] = None,
) -> None:
    """Draw the figures from the JSON files named below, as far as they are there."""
    names = ("prefill", "model", "allocations", "linear", "peers", "simulate")
    files = {name: results / f"{name}.json" for name in names}
    found = {name: read_report(file) for name, file in files.items() if file.is_file()}
    if not found:
        raise typer.BadParameter(
            f"--results must hold one of {', '.join(names)}, each .json: {results}"
        )
    folder = output or results
    speed = [found.get(name) for name in ("prefill", "model")]
    drawn = [draw_throughput(*speed, folder / "throughput_comparison.png") if any(speed) else None]
    for name, draw, file in (
        ("allocations", draw_memory, "memory_profile.png"),
        ("linear", draw_linear, "linear.png"),
        ("peers", draw_peers, "peers.png"),
        ("simulate", draw_scale, "scale.png"),
    ):
        drawn.append(draw(found[name], folder / file) if name in found else None)
    for path in filter(None, drawn):
        typer.echo(path)


def draw_throughput(prefill: Row | None, model: Row | None, path: Path) -> Path:
    """Draw tokens a second by prompt length: attention of one layer, and whole models."""
    layers, models = _groups(prefill), _groups(model)
    figure, grid = _make_figure(len(layers) + len(models))
    for axes, (title, rows) in zip(grid, [*layers.items(), *models.items()], strict=True):
        if title in layers:
            for name, style in (("dense", DENSE), ("sparse", SPARSE)):
                _draw_line(axes, name, rows, _layer_rate(name), **style)
            for row in (row for row in rows if row["flop_ratio"] > 1):
                axes.annotate(
                    f"{row['speedup']:.1f}x",
                    (row["length"], _layer_rate("sparse")(row)),
                    textcoords="offset points",
                    xytext=(3, 5),
                    ha="left",
                    fontsize=8,
                    color=ORANGE,
                )
        else:
            for variant, (name, style) in VARIANTS.items():
                chosen = [row for row in rows if row["variant"] == variant]
                _draw_line(axes, name, chosen, itemgetter("tokens_per_second"), **style)
        axes.set_title(title, fontsize=9)
        _use_length_axis(axes, rows)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.set_ylabel("tokens / s")
        axes.legend(frameon=False, fontsize=8)
    return _save_figure(figure, "Prefill throughput (higher is better)", prefill or model, path)


def draw_memory(allocations: Row, path: Path) -> Path:
    """Draw memory beside the KV cache by prompt length, and memory held over many prompts."""
    rows = allocations["results"]
    sizes = _groups({**allocations, "results": [r for r in rows if "length" in r]})
    held = [row for row in rows if row.get("allocated_bytes") and row["allocated_bytes"][0]]
    figure, grid = _make_figure(len(sizes) + bool(held))
    for axes, (title, chosen) in zip(grid, sizes.items(), strict=False):
        for field, (label, style) in MEMORY.items():
            _draw_line(axes, label, chosen, itemgetter(field), **style)
        axes.set_title(title + ", one layer", fontsize=9)
        _use_length_axis(axes, chosen)
        _use_log_axis(axes, "MB")
    _add_legend(figure, grid[0], 4)
    if held:
        _draw_growth(grid[-1], held)
    return _save_figure(figure, "Memory of sparse prefill", allocations, path)


def _groups(report: Row | None) -> dict[str, list[Row]]:
    """Return the rows by panel: one for each model and dtype, with the most threads."""
    groups: dict[str, list[Row]] = {}
    if report is None:
        return groups
    model = Path(report["config"].get("model", "")).name
    most = max(row["threads"] for row in report["results"])
    longest = max(row["length"] for row in report["results"])
    for row in report["results"]:
        # The shortest prompts are of interest in the table only.
        if row["threads"] == most and row["length"] >= min(512, longest):
            name = f"attention, {row['model']}" if "model" in row else model
            groups.setdefault(f"{name}, {row['dtype']}, {_threads(most)}", []).append(row)
    return groups


def _layer_rate(name: str) -> Callable[[Row], float]:
    return lambda row: 1e3 * row["length"] / row[f"{name}_milliseconds"]


def _draw_growth(axes: Axes, rows: list[Row]) -> None:
    for row in rows:
        held = row["allocated_bytes"]
        changes = [(now - held[0]) / 1e6 for now in held]
        label = f"{row['model']}, {row['dtype']}, {row['threads']} thr."
        axes.plot(range(1, len(held) + 1), changes, label=label, linewidth=1.2)
    # Not resident memory, which the C library gives back when it likes. The axis spans a
    # megabyte at least: some bytes are no growth.
    axes.set_ylim(min(-0.1, axes.get_ylim()[0]), max(1.0, axes.get_ylim()[1]))
    axes.set_title("allocated memory since the first prompt", fontsize=9)
    axes.set_xlabel("prompts")
    axes.set_ylabel("MB")
    axes.legend(frameon=False, fontsize=7)


def draw_linear(report: Row, path: Path) -> Path:
    """Draw time and temporary memory by length, and both by chunk size, for every shape.

    Of several dtypes the first is drawn, of several numbers of threads the largest.
    """
    first = report["results"][0]
    most = max(row.get("threads", 0) for row in report["results"])
    case = {"dtype": first["dtype"], "threads": most}
    rows = [row for row in report["results"] if {"threads": 0, **row}.items() >= case.items()]
    shapes = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = _make_figure(3 * len(shapes))
    for i, name in enumerate(shapes):
        chosen = [row for row in rows if row["model"] == name]
        time, memory, sweep = grid[3 * i : 3 * i + 3]
        by_length = [row for row in chosen if not row.get("swept")]
        for unit, axes, label in (
            ("milliseconds", time, "ms"),
            ("megabytes", memory, "MB beside the results"),
        ):
            for form, (name_of_form, style) in FORMS.items():
                field = "temporary_megabytes" if (form, unit) == ("", "megabytes") else form + unit
                shown = [row for row in by_length if row.get(field, 0) > 0]
                _draw_line(axes, name_of_form, shown, itemgetter(field), **style)
            _use_length_axis(axes, by_length, "sequence (tokens)")
            _use_log_axis(axes, label)
        _draw_sweep(sweep, [row for row in chosen if row.get("swept")], first["chunk_size"])
        time.set_title(f"{name}, D = {chosen[0]['head_dim']}: time", fontsize=9)
        memory.set_title(f"{name}: temporary memory", fontsize=9)
    _add_legend(figure, grid[0], 4)
    threads = f", {_threads(most)}" if most else ""
    title = f"Linear attention, {first['dtype']}{threads} (lower is better)"
    return _save_figure(figure, title, report, path)


def _draw_sweep(axes: Axes, rows: list[Row], default: int) -> None:
    """Draw everything relative to the default chunk size."""
    if not rows:
        axes.remove()
        return
    rows = sorted(rows, key=itemgetter("chunk_size"))
    (base,) = (row for row in rows if row["chunk_size"] == default)
    sizes = [{**row, "length": row["chunk_size"]} for row in rows]
    for label, field, style in (
        ("time", "milliseconds", SPARSE),
        ("with its backward", "both_milliseconds", SPARSE | BACKWARD),
        ("temporary memory", "temporary_megabytes", GREY),
    ):
        _draw_line(axes, label, sizes, lambda row, f=field: row[f] / base[f], **style)
    _use_length_axis(axes, sizes, "chunk size (tokens)")
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    axes.set_ylabel(f"relative to C = {default}")
    axes.set_title(f"chunk size, at {base['length']} tokens", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def draw_peers(report: Row, path: Path) -> Path | None:
    """Draw the estimated KL to the own dense mode by the seconds of a prefill, for each length.

    Returns None, and draws nothing, where no row has both a loss and a time.
    """
    rows = [row for row in report["results"] if {"delta_percent", "seconds"} <= set(row)]
    if not rows:
        return None
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    styles = _peer_styles(rows)
    figure, grid = _make_figure(len(lengths))
    columns = min(len(lengths), 3)
    figure.set_size_inches(5.6 * columns, 4.6 * -(-len(lengths) // columns) + 1.8)
    for axes, length in zip(grid, lengths, strict=True):
        chosen = [row for row in rows if row["length"] == length]
        for row in chosen:
            point = (row["seconds"], row.get("kl_estimate", 0.0))
            axes.plot(*point, linestyle="none", label=row["variant"], **styles[row["variant"]])
        axes.set_title(f"{length:,} tokens, {_threads(chosen[0]['threads'])}", fontsize=9)
        _use_peer_axes(axes, chosen)
    _add_legend(figure, grid[0], 4)
    title = "What prefill changes beside its time: lower left is better"
    return _save_figure(figure, title, report, path)


def _peer_styles(rows: list[Row]) -> dict[str, Style]:
    """Return a colour for each program, a marker for each mode, a fill for each form of a mode."""
    programs = dict.fromkeys(row["program"] for row in rows)
    colours = dict(zip(programs, (PINK, BLUE, ORANGE, GREEN, "0.3", "0.6"), strict=False))
    modes: dict[str, dict[str, int]] = {}
    styles = {}
    for row in rows:
        # Formats of OpenVINO and llama.cpp stand after their names.
        mode = name = row["variant"].removesuffix(", package")
        if row["program"] in ("openvino", "llama.cpp"):
            mode = re.sub(r" \S+", "", name, count=1)
        known = modes.setdefault(row["program"], {})
        fill = "left" if name != row["variant"] else _FILLS.get(row["bits"], "full")
        styles[row["variant"]] = {
            "color": colours[row["program"]],
            "marker": _MARKERS[known.setdefault(mode, len(known)) % len(_MARKERS)],
            "fillstyle": fill,
            "markersize": 8,
        }
    return styles


def _use_peer_axes(axes: Axes, rows: list[Row]) -> None:
    seconds = [row["seconds"] for row in rows]
    axes.set_xscale("log")
    axes.set_xlim(min(seconds) / 1.25, max(seconds) * 1.25)
    low, high = axes.get_xlim()
    ticks = [tick for tick in _SECOND_TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("seconds to the first token")
    # Linear below what rounding alone changes: dense modes are at 0 by definition.
    axes.set_yscale("symlog", linthresh=1e-3)
    highest = max(row.get("kl_estimate", 0.0) for row in rows)
    axes.set_ylim(-2e-4, 2 * max(highest, 2e-3))
    ticks = [tick for tick in _KL_TICKS if tick <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylabel("estimated KL to the program's dense mode, nats")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


def draw_scale(report: Row, path: Path) -> Path:
    """Draw the simulated efficiency of processes by their number, and what they receive."""
    rows = [row for row in report["results"] if "recalled_mb" in row]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    figure, grid = _make_figure(2 * len(lengths))
    lines = {
        "tokens_efficiency_percent": ("ranges of tokens", SPARSE),
        "layers_efficiency_percent": ("stages of layers", DENSE),
        "recalled_mb": ("recalled rows", SPARSE),
        "ring_mb": ("ring attention", GREY),
    }
    for axes, (traffic, length) in zip(
        grid, itertools.product((False, True), lengths), strict=True
    ):
        for field, (label, style) in lines.items():
            chosen = [row for row in rows if row["length"] == length and row.get(field)]
            if chosen and field.endswith("_mb") == traffic:
                points = [row["ranks"] for row in chosen], [row[field] for row in chosen]
                axes.plot(*points, label=label, markersize=4, **style)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["ranks"] for row in rows})
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xlabel("processes")
        axes.set_title(f"{length:,} tokens", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        if traffic:
            _use_log_axis(axes, "MB received in a layer")
            axes.set_ylim(bottom=1)
        else:
            axes.set_ylim(0, 105)
            axes.set_ylabel("efficiency, %")
    return _save_figure(figure, "One prompt over several processes, simulated", report, path)


def _make_figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, at most three in a row."""
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    figure = plotting.make_figure(3.4 * rows + 0.5, 4.4 * columns)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[panels:]:
        axes.remove()
    for axes in grid[:panels]:
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid[:panels]


def _draw_line(
    axes: Axes, label: str, rows: list[Row], value: Callable[[Row], float], **style: Any
) -> None:
    """Draw a value of rows, if there are any, by their length."""
    if rows:
        lengths, values = [row["length"] for row in rows], [value(row) for row in rows]
        axes.plot(lengths, values, label=label, **{"linewidth": 1.6, "markersize": 4, **style})


def _use_length_axis(axes: Axes, rows: list[Row], label: str = "prompt (tokens)") -> None:
    """Make the x axis one of the lengths of rows, which double."""
    ticks = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.margins(x=0.1)
    axes.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def _use_log_axis(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel(label)


def _add_legend(figure: Figure, axes: Axes, columns: int) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def _save_figure(figure: Figure, title: str, report: Row, path: Path) -> Path:
    """Write a figure, with the machine below its title; return the file."""
    facts = report["environment"]
    quick = " (quick: the figures mean nothing)" if report["quick"] else ""
    machine = f"{facts['cpu']}, {facts['library']['cpu_isa_used']}, torch {facts['torch']}"
    plotting.save_figure(figure, path, f"{title}{quick}\n{machine}")
    return path


def _thousands(number: float, _: object) -> str:
    return f"{number / 1e3:g}k" if number >= 1000 else f"{number:g}"


def _threads(count: int) -> str:
    return f"{count} thread{'s'[: count > 1]}"


if __name__ == "__main__":
    app()
