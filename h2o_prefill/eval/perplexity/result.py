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

    ppl: float  # over all scored tokens
    ppl_stderr: float  # with tokens taken as independent
    ppl_by_chunk: list[float | None]  # a number a chunk of a window; None where none is scored
    ppl_by_window: list[float]
    seconds: float  # of the forward calls of all windows, without the output layer's logits
    seconds_by_window: list[float]


@dataclass(frozen=True)
class PositionCurve:
    """Perplexity along an axis of positions."""

    begin: list[int]  # first row of each bin
    width: int  # rows of a bin
    dense: list[float | None]  # None where a bin holds no scored row
    sparse: list[float | None]


@dataclass(frozen=True)
class KeyTokens:
    """Perplexity on the tokens that need the long context (`key_tokens.find_key_tokens`)."""

    count: int
    dense_ppl: float  # LongPPL; NaN if there are no such tokens
    sparse_ppl: float
    delta_percent: float  # sparse above dense
    stderr_percent: float  # its standard error, from blocks of these tokens


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity sparse and dense on the same windows; as a float, the sparse one."""

    dense: RunResult
    sparse: RunResult
    delta_percent: float  # sparse perplexity above dense, in percent
    # Standard error of delta_percent, from paired differences (`estimates.relative_difference`).
    stderr_percent: float
    kl_mean: float  # mean KL(dense || sparse) of the next-token distributions, nats
    top1_agreement: float  # share of rows for which both runs have the same most likely token
    # Query-key products of dense attention over those of the sparse one, in all windows.
    attention_flops_ratio: float
    # By which errors have multiplied L and H, mean of chunks, KV heads and windows; None where
    # `error_rows` is 0.
    widening: float | None
    recalled_keys: float | None  # that a row sees, mean of all rows; None where recall is off
    by_position: PositionCurve  # along the window
    # Along a chunk, over all chunks but the first (where both runs are the same).
    by_chunk_position: PositionCurve
    config: PrefillConfig
    select: str | None  # the name of the selection rule, None if there is none
    protocol: str
    context: int  # tokens of a window
    windows: list[int]  # their indices in the text
    scored_tokens: int
    key_tokens: KeyTokens | None  # None if they were not asked for

    def __float__(self) -> float:
        return self.sparse.ppl

    @property
    def worst_percent(self) -> float:
        """`delta_percent` of the window where it is largest."""
        pairs = zip(self.dense.ppl_by_window, self.sparse.ppl_by_window, strict=True)
        return max(100 * (sparse / dense - 1) for dense, sparse in pairs)


def perplexity_report(result: PerplexityResult, **origin: Any) -> dict[str, Any]:
    """Return the report of an evaluation; `origin` adds model, dtype and text."""
    values = asdict(result)
    names = "select", "protocol", "context", "windows"
    config = {**origin, **{key: values.pop(key) for key in names}}
    config.update(values.pop("config"))
    return build_report(config, **values)


def summarize(
    scored: list[WindowScores],
    seconds: list[tuple[float, float]],
    *,
    rows: range,
    config: PrefillConfig,
    flops: AttentionFlops,
    context: int,
    is_key: list[Tensor],
    **settings: Any,
) -> PerplexityResult:
    """Return the result of windows with these scores and (dense, sparse) seconds.

    `is_key` has the rows of each window that predict a key token, bool [rows], or no windows.
    """
    scores = WindowScores(*map(torch.stack, zip(*scored, strict=True)))
    dense, sparse = scores.dense_nll, scores.sparse_nll
    chunk_size, row = config.chunk_size, torch.arange(rows.start, rows.stop)
    in_chunk = torch.where(row >= chunk_size, row % chunk_size, -1)

    def run(nll: Tensor, times: tuple[float, ...]) -> RunResult:
        chunks = -(-context // chunk_size)
        return RunResult(
            ppl=estimates.perplexity(nll),
            ppl_stderr=estimates.perplexity_error(nll),
            ppl_by_chunk=estimates.binned_perplexity(nll, row // chunk_size, chunks),
            ppl_by_window=[estimates.perplexity(window) for window in nll],
            seconds=sum(times),
            seconds_by_window=list(times),
        )

    def curve(position: Tensor, length: int) -> PositionCurve:
        """Bin by `position` [scored tokens] in [0, length); -1 leaves a token out."""
        width = max(1, chunk_size // _BINS_PER_CHUNK)
        begin = list(range(0, length, width))
        bins = torch.div(position, width, rounding_mode="floor")
        binned = (estimates.binned_perplexity(nll, bins, len(begin)) for nll in (dense, sparse))
        return PositionCurve(begin, width, *binned)

    dense_seconds, sparse_seconds = zip(*seconds, strict=True)
    delta_percent, stderr_percent = estimates.relative_difference(dense, sparse)
    return PerplexityResult(
        dense=run(dense, dense_seconds),
        sparse=run(sparse, sparse_seconds),
        delta_percent=delta_percent,
        stderr_percent=stderr_percent,
        kl_mean=scores.kl.double().mean().item(),
        top1_agreement=scores.same_top1.double().mean().item(),
        attention_flops_ratio=flops.ratio,
        recalled_keys=flops.recalled_keys,
        widening=flops.widening,
        by_position=curve(row, context),
        by_chunk_position=curve(in_chunk, chunk_size),
        config=config,
        context=context,
        scored_tokens=dense.numel(),
        key_tokens=_key_tokens(dense, sparse, torch.stack(is_key)) if is_key else None,
        **settings,
    )


def _key_tokens(dense: Tensor, sparse: Tensor, is_key: Tensor) -> KeyTokens:
    before, after = dense[is_key], sparse[is_key]
    return KeyTokens(
        len(before),
        estimates.perplexity(before),
        estimates.perplexity(after),
        *estimates.relative_difference(before.unsqueeze(0), after.unsqueeze(0)),
    )
