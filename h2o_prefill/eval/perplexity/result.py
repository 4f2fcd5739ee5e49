"""The result of a perplexity evaluation, and how it is made from the scores of windows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import AttentionFlops
from h2o_prefill.eval.perplexity import estimates
from h2o_prefill.eval.perplexity.scoring import WindowScores
from h2o_prefill.eval.report import build_report

# Bins of a chunk in the curves.
_BINS_PER_CHUNK = 16


@dataclass(frozen=True)
class RunResult:
    """Perplexity of the dense or the sparse run."""

    # Perplexity over all scored tokens.
    ppl: float
    # Standard error of ppl, with tokens taken as independent.
    ppl_stderr: float
    # One number a chunk of a window; None where the protocol scores none.
    ppl_by_chunk: list[float | None]
    ppl_by_window: list[float]
    # Time of the forward calls of all windows, without the output layer's logits.
    seconds: float
    seconds_by_window: list[float]


@dataclass(frozen=True)
class PositionCurve:
    """Perplexity along an axis of positions."""

    # First row of each bin.
    begin: list[int]
    # Rows of a bin.
    width: int
    # None where a bin holds no scored row.
    dense: list[float | None]
    sparse: list[float | None]


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a model under sparse prefill beside the same model dense, on the same windows.

    `float(result)` is the sparse perplexity.
    """

    dense: RunResult
    sparse: RunResult
    # Sparse perplexity above dense, in percent.
    delta_percent: float
    # Standard error of delta_percent, from paired differences (`estimates.relative_difference`).
    stderr_percent: float
    # Mean of KL(dense || sparse) of the next-token distributions, nats.
    kl_mean: float
    # Share of rows for which both runs have the same most likely token.
    top1_agreement: float
    # Query-key products of dense attention over those of the sparse one, in all windows.
    attention_flops_ratio: float
    # Recalled keys that a row sees, mean of all rows; None where recall is off.
    recalled_keys: float | None
    # Along the window.
    by_position: PositionCurve
    # Along a chunk, over all chunks but the first (where both runs are the same).
    by_chunk_position: PositionCurve
    config: PrefillConfig
    protocol: str
    # Tokens of a window.
    context: int
    # The windows' indices in the text.
    windows: list[int]
    scored_tokens: int

    def __float__(self) -> float:
        return self.sparse.ppl

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dicts, lists and numbers."""
        return asdict(self)


def perplexity_report(result: PerplexityResult, **origin: Any) -> dict[str, Any]:
    """Return the report of an evaluation; `origin` is what it does not know: model, dtype, text."""
    values = result.to_dict()
    config = {**origin, **{key: values.pop(key) for key in ("protocol", "context", "windows")}}
    config.update(values.pop("config"))
    return build_report(config, **values)


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
    """Return the result of windows with these scores and (dense, sparse) seconds."""
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
