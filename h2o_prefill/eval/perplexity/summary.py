"""From the scores of windows to a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import AttentionFlops
from h2o_prefill.eval.perplexity import estimates
from h2o_prefill.eval.perplexity.result import PerplexityResult, PositionCurve, RunResult
from h2o_prefill.eval.perplexity.scoring import WindowScores

# Bins of a chunk in the curves.
_BINS_PER_CHUNK = 16


def summarize(
    scores: list[WindowScores],
    seconds: list[tuple[float, float]],
    *,
    rows: range,
    config: PrefillConfig,
    context: int,
    flops: AttentionFlops,
    **settings: Any,
) -> PerplexityResult:
    """Put windows together.

    Parameters
    ----------
    scores : list of WindowScores
        One a window.
    seconds : list of (float, float)
        Of the dense and the sparse call of each window.
    rows : range
        The rows that were scored.
    config : PrefillConfig
        Of the sparse run.
    context : int
        Tokens of a window.
    flops : AttentionFlops
        Of all windows.
    settings
        What else the result holds.
    """
    dense = torch.stack([window.dense_nll for window in scores])
    sparse = torch.stack([window.sparse_nll for window in scores])
    row = torch.arange(rows.start, rows.stop)
    delta_percent, stderr_percent = estimates.relative_difference(dense, sparse)
    return PerplexityResult(
        dense=_run(dense, [pair[0] for pair in seconds], row, config.chunk_size, context),
        sparse=_run(sparse, [pair[1] for pair in seconds], row, config.chunk_size, context),
        delta_percent=delta_percent,
        stderr_percent=stderr_percent,
        kl_mean=torch.cat([window.kl for window in scores]).double().mean().item(),
        top1_agreement=torch.cat([window.same_top1 for window in scores]).double().mean().item(),
        by_position=_curve(dense, sparse, row, context, config.chunk_size),
        by_chunk_position=_curve(
            dense,
            sparse,
            torch.where(row >= config.chunk_size, row % config.chunk_size, -1),
            config.chunk_size,
            config.chunk_size,
        ),
        config=config,
        context=context,
        attention_flops_ratio=flops.ratio,
        recalled_keys=flops.recalled_keys,
        scored_tokens=dense.numel(),
        **settings,
    )


def _run(
    nll: Tensor, seconds: list[float], row: Tensor, chunk_size: int, context: int
) -> RunResult:
    return RunResult(
        ppl=estimates.perplexity(nll),
        ppl_stderr=estimates.perplexity_error(nll),
        ppl_by_chunk=estimates.binned_perplexity(nll, row // chunk_size, -(-context // chunk_size)),
        ppl_by_window=[estimates.perplexity(window) for window in nll],
        seconds=sum(seconds),
        seconds_by_window=seconds,
    )


def _curve(
    dense: Tensor, sparse: Tensor, position: Tensor, length: int, chunk_size: int
) -> PositionCurve:
    """Bin by `position` [scored tokens] in [0, length); -1 leaves a token out."""
    width = max(1, chunk_size // _BINS_PER_CHUNK)
    count = -(-length // width)
    bins = torch.div(position, width, rounding_mode="floor")
    return PositionCurve(
        begin=[index * width for index in range(count)],
        width=width,
        dense=estimates.binned_perplexity(dense, bins, count),
        sparse=estimates.binned_perplexity(sparse, bins, count),
    )
