"""Draws the figures of the benchmarks from their JSON files."""

from __future__ import annotations

import functools
import json
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from common import options
from common.plan import RESULTS
from common.plot_linear import plot_linear
from common.plot_parts import Row, draw_line, make_figure, save_figure, use_length_axis
from common.plot_peers import plot_peers
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

# Told apart by people who see colours differently, and by line style and marker in print.
STYLES: dict[str, dict[str, Any]] = {
    "dense": {"color": "#0072B2", "marker": "o"},
    "dense in chunks": {"color": "#56B4E9", "marker": "s", "linestyle": "--"},
    "sparse": {"color": "#D55E00", "marker": "D"},
    "without attention": {"color": "0.45", "marker": None, "linestyle": ":"},
}
_SHORTEST = 512
VARIANTS = {
    "dense": "dense",
    "dense_chunked": "dense in chunks",
    "sparse": "sparse",
    "no_attention": "without attention",
}


def plot_throughput(prefill: Row | None, model: Row | None, path: Path) -> Path:
    """Draw tokens a second by prompt length: attention of one layer, and whole models."""
    layers, models = _groups(prefill, "layer"), _groups(model, "model")
    figure, grid = make_figure(len(layers) + len(models))
    for axes, (title, rows) in zip(grid, [*layers.items(), *models.items()], strict=True):
        if title in layers:
            for name in ("dense", "sparse"):
                draw_line(
                    axes, name, rows, functools.partial(_layer_rate, name=name), **STYLES[name]
                )
            _label_speedups(axes, rows)
        else:
            for variant, name in VARIANTS.items():
                chosen = [row for row in rows if row["variant"] == variant]
                draw_line(axes, name, chosen, itemgetter("tokens_per_second"), **STYLES[name])
        axes.set_title(title, fontsize=9)
        use_length_axis(axes, [row["length"] for row in rows])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.set_ylabel("tokens / s")
        axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, "Prefill throughput (higher is better)", [prefill, model], path)


def plot_memory(allocations: Row, path: Path) -> Path:
    """Draw memory beside the KV cache by prompt length, and memory held over many prompts."""
    rows = allocations["rows"]
    sizes = _groups({**allocations, "rows": [r for r in rows if "length" in r]}, "layer")
    held = [row for row in rows if row.get("allocated_bytes") and row["allocated_bytes"][0]]
    figure, grid = make_figure(len(sizes) + bool(held))
    for axes, (title, chosen) in zip(grid, sizes.items(), strict=False):
        draw_line(axes, "KV cache", chosen, itemgetter("kv_megabytes"), color="0.45")
        workspaces = (("dense", "dense_workspace_megabytes"), ("sparse", "workspace_megabytes"))
        for name, field in workspaces:
            label = f"workspace, {name}"
            draw_line(axes, label, chosen, itemgetter(field), **STYLES[name])
        state = {"color": "#009E73", "marker": "^"}
        draw_line(axes, "scores + memory set", chosen, itemgetter("state_megabytes"), **state)
        axes.set_title(title + ", one layer", fontsize=9)
        use_length_axis(axes, [row["length"] for row in chosen])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_ylabel("MB")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    if held:
        _draw_growth(grid[-1], held)
    return save_figure(figure, "Memory of sparse prefill", [allocations], path)


def main(
    results: Annotated[
        Path, typer.Option("--results", metavar="FOLDER", help="Where the JSON files are.")
    ] = RESULTS,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Where the figures go. Default: there."),
    ] = None,
) -> None:
    """Draw the figures from prefill, model, allocations, linear and peers.json, as far as there."""
    names = ("prefill", "model", "allocations", "linear", "peers")
    found = {name: _read(results / f"{name}.json") for name in names}
    if not any(found.values()):
        raise typer.BadParameter(
            f"--results must hold prefill, model, allocations, linear or peers.json: {results}"
        )
    folder = output or results
    if found["prefill"] or found["model"]:
        typer.echo(
            plot_throughput(found["prefill"], found["model"], folder / "throughput_comparison.png")
        )
    if found["allocations"]:
        typer.echo(plot_memory(found["allocations"], folder / "memory_profile.png"))
    if found["linear"]:
        typer.echo(plot_linear(found["linear"], folder / "linear.png"))
    if found["peers"] and (figure := plot_peers(found["peers"], folder / "peers.png")):
        typer.echo(figure)


def _read(path: Path) -> Row | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _groups(result: Row | None, kind: str) -> dict[str, list[Row]]:
    """Return the rows by panel: one for each model and dtype, with the most threads."""
    if result is None:
        return {}
    most = max(row["threads"] for row in result["rows"])
    groups: dict[str, list[Row]] = {}
    longest = max(row["length"] for row in result["rows"])
    for row in result["rows"]:
        # The shortest prompts are of interest in the table only.
        if row["threads"] == most and row["length"] >= min(_SHORTEST, longest):
            name = (
                f"attention, {row['model']}"
                if kind == "layer"
                else Path(result["options"]["model"]).name
            )
            title = f"{name}, {row['dtype']}, {most} thread{'s'[: most > 1]}"
            groups.setdefault(title, []).append(row)
    return groups


def _layer_rate(row: Row, name: str) -> float:
    return 1e3 * row["length"] / row[f"{name}_milliseconds"]


def _label_speedups(axes: Axes, rows: list[Row]) -> None:
    for row in rows:
        if row["flop_ratio"] > 1:
            axes.annotate(
                f"{row['speedup']:.1f}x",
                (row["length"], _layer_rate(row, "sparse")),
                textcoords="offset points",
                xytext=(3, 5),
                ha="left",
                fontsize=8,
                color=STYLES["sparse"]["color"],
            )


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


def _thousands(number: float, _: object) -> str:
    return f"{number / 1e3:g}k" if number >= 1000 else f"{number:g}"


app = options.command(main)

if __name__ == "__main__":
    app()
