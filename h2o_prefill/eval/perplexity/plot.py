"""The figure of a perplexity evaluation."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from h2o_prefill.eval.perplexity.result import PerplexityResult, PositionCurve
from h2o_prefill.eval.plotting import DENSE, SPARSE, draw_lines_behind, make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_perplexity(
    result: PerplexityResult, path: str | os.PathLike[str], title: str = ""
) -> Figure:
    """Draw perplexity by position in the window and in the average chunk, above the difference."""
    figure = make_figure(5.6)
    (window, chunk), (window_change, chunk_change) = figure.subplots(
        2, 2, width_ratios=(3, 2), height_ratios=(3, 2), sharex="col", sharey="row"
    )
    _draw(window, window_change, result.by_position, result.context)
    _draw(chunk, chunk_change, result.by_chunk_position, result.config.chunk_size)
    for axes in (window, window_change):
        for begin in range(result.config.chunk_size, result.context, result.config.chunk_size):
            axes.axvline(begin, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    error = result.stderr_percent
    known = "" if math.isnan(error) else f" ± {error:.2f}"
    window.set_title(
        f"dense {result.dense.ppl:.3f}, sparse {result.sparse.ppl:.3f} "
        f"({result.delta_percent:+.2f} %{known})",
        fontsize=10,
    )
    chunk.set_title("average of all chunks but the first", fontsize=10)
    chunk.legend(frameon=False, loc="upper right", ncols=2)
    window.set_ylabel("perplexity")
    window_change.set_ylabel("sparse above dense (%)")
    window_change.set_xlabel("position in the window (tokens; dotted: chunk boundaries)")
    chunk_change.set_xlabel("position in the chunk (tokens)")
    save_figure(figure, path, title)
    return figure


def _draw(above: Axes, below: Axes, curve: PositionCurve, length: int) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    edges = [*curve.begin, curve.begin[-1] + curve.width]
    # None becomes NaN.
    dense, sparse = (np.array(values, dtype=float) for values in (curve.dense, curve.sparse))
    above.stairs(dense, edges, baseline=None, **DENSE)
    above.stairs(sparse, edges, baseline=None, **SPARSE)
    above.set_yscale("log")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter(ScalarFormatter())
    above.yaxis.set_minor_formatter(NullFormatter())
    change = 100 * (sparse / dense - 1)
    below.stairs(change, edges, baseline=0, fill=True, color=SPARSE["color"], alpha=0.5)
    below.axhline(0, color="0.3", linewidth=0.8)
    for axes in (above, below):
        axes.set_xlim(0, length)
        draw_lines_behind(axes)
