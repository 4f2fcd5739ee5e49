"""What the memory sets of a prompt hold and cost, as figures and a page."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.error import measure_attention
from h2o_prefill.eval.attention.patterns import AttentionPatterns, collect_patterns
from h2o_prefill.eval.runs import Progress

if TYPE_CHECKING:
    import pandas as pd


def visualize_attention_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    output_dir: str | os.PathLike[str] = "benchmark_results/attention_heatmaps",
    *,
    title: str = "",
    errors: bool = True,
    ablation: pd.DataFrame | None = None,
    on_progress: Progress | None = None,
) -> AttentionPatterns:
    """Prefill a prompt sparsely and draw what its memory sets hold, and what that costs.

    Writes a figure each of the positions that the heads of each layer hold after each chunk, the
    attention that each position received, the share of heads that hold the first positions, how
    many heavy positions stay from one memory set to the next, and for how many chunks they stay; of
    each head's error against dense attention, and of the errors by chunk; with recall, of the
    positions recalled. `index.html` shows all of them and says what they show.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder with dense attention.
    input_ids : Tensor
        int64 [1, T] or [T]: at least two chunks.
    chunk_config : PrefillConfig or str, optional
        Default: that of `enable`.
    output_dir : path
        Folder for the files; it is made if it is not there.
    title : str
        What was run, for the figures.
    errors : bool
        Measure the errors too, see `measure_attention`: a dense run, and more time than the sparse
        one.
    ablation : pandas.DataFrame, optional
        Rows as `run_ablation` returns them: draw their perplexity against attention flops too.
    on_progress : callable, optional
        Called with (steps done, steps in all, what runs next), first for the chunks of the sparse
        run, then for the layers of the dense one.

    Returns
    -------
    AttentionPatterns

    Raises
    ------
    ValueError
        If an argument is out of its range, or the model already runs sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    ImportError
        If matplotlib is missing.
    """
    from h2o_prefill.eval.ablation.plot import plot_ablation
    from h2o_prefill.eval.attention.pattern_page import PAGE_NAME, write_pattern_page
    from h2o_prefill.eval.attention.pattern_plots import plot_patterns

    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {str(folder)!r}")
    patterns = collect_patterns(model, input_ids, chunk_config, on_progress=on_progress)
    if errors:
        measures = measure_attention(model, input_ids, chunk_config, on_progress=on_progress)
        patterns = dataclasses.replace(patterns, measures=measures)
    folder.mkdir(parents=True, exist_ok=True)
    patterns.paths.update(plot_patterns(patterns, folder, title))
    if ablation is not None:
        patterns.paths["perplexity"] = folder / "perplexity.png"
        plot_ablation(ablation, patterns.paths["perplexity"])
    page = write_pattern_page(patterns, folder / PAGE_NAME, title)
    return dataclasses.replace(patterns, page=page)
