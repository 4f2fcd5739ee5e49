"""Heat maps of retrieval."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING

from h2o_prefill.eval.needles.result import RetrievalResult
from h2o_prefill.eval.needles.scoring import DENSE
from h2o_prefill.eval.plotting import make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_retrieval(
    result: RetrievalResult, path: str | os.PathLike[str], title: str = ""
) -> Figure:
    """Draw the mean score by length and depth, a row of maps a task, one a variant.

    Parameters
    ----------
    result : RetrievalResult
    path, title
        As `save_figure` takes them.

    Returns
    -------
    matplotlib.figure.Figure
    """
    tasks = list(dict.fromkeys(outcome.task for outcome in result.outcomes))
    depths = list(dict.fromkeys(outcome.depth for outcome in result.outcomes))
    lengths = list(dict.fromkeys(outcome.length for outcome in result.outcomes))
    ways = [DENSE, *result.variants]
    width = 1.6 + len(ways) * (1.2 + 0.6 * len(lengths))
    height = 1.0 + len(tasks) * (0.9 + 0.3 * len(depths))
    figure = make_figure(height, width)
    panels = figure.subplots(len(tasks), len(ways), sharex=True, sharey=True, squeeze=False)
    for task, row in zip(tasks, panels, strict=True):
        for way, axes in zip(ways, row, strict=True):
            _draw(axes, mean_scores(result, task, way, depths, lengths))
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        row[0].set_ylabel(f"{task}\ndepth (%)")
    for way, top, bottom in zip(ways, panels[0], panels[-1], strict=True):
        # Names of variants can be longer than a map is wide.
        top.set_title(way.replace(",", ",\n"), fontsize=8)
        bottom.set_xlabel("tokens")
    figure.colorbar(panels[0, 0].images[0], ax=list(panels.flat), label="mean score")
    save_figure(figure, path, title, title_size=10)
    return figure


def mean_scores(
    result: RetrievalResult,
    task: str,
    variant: str,
    depths: list[float],
    lengths: list[int],
) -> list[list[float]]:
    """Return the mean score of a variant at each depth (rows) and length (columns)."""
    return [
        [
            statistics.fmean(
                outcome.scores[variant]
                for outcome in result.outcomes
                if (outcome.task, outcome.depth, outcome.length) == (task, depth, length)
            )
            for length in lengths
        ]
        for depth in depths
    ]


def _draw(axes: Axes, scores: list[list[float]]) -> None:
    axes.imshow(scores, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, values in enumerate(scores):
        for column, value in enumerate(values):
            colour = "black" if value > 0.5 else "white"
            axes.text(
                column, row, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=7
            )
