"""What a perplexity evaluation found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.report import build_report


@dataclass(frozen=True)
class RunResult:
    """One way to run the model, dense or sparse.

    Attributes
    ----------
    ppl : float
        Perplexity over all scored tokens.
    ppl_stderr : float
        Its standard error, with tokens taken as independent.
    ppl_by_chunk : list of float or None
        Of the rows of each chunk of a window; None where the protocol scores none.
    ppl_by_window : list of float
    seconds : float
        Of the forward calls of all windows, without the output layer's logits.
    seconds_by_window : list of float
    """

    ppl: float
    ppl_stderr: float
    ppl_by_chunk: list[float | None]
    ppl_by_window: list[float]
    seconds: float
    seconds_by_window: list[float]


@dataclass(frozen=True)
class PositionCurve:
    """Perplexity along an axis of positions.

    Attributes
    ----------
    begin : list of int
        First row of each bin.
    width : int
        Rows of a bin.
    dense, sparse : list of float or None
        None where a bin holds no scored row.
    """

    begin: list[int]
    width: int
    dense: list[float | None]
    sparse: list[float | None]


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a model under sparse prefill beside the same model dense, on the same windows.

    `float(result)` is the sparse perplexity.

    Attributes
    ----------
    dense, sparse : RunResult
    delta_percent : float
        By how much the sparse perplexity is above the dense one.
    stderr_percent : float
        The standard error of that, from paired differences (`estimates.relative_difference`).
    kl_mean : float
        Mean of KL(dense || sparse) of the next-token distributions, nats.
    top1_agreement : float
        Share of rows where both hold the same token most likely.
    attention_flops_ratio : float
        Query-key products of dense attention over those of the sparse one, in all windows.
    recalled_keys : float or None
        Recalled keys that a row sees, mean of all rows; None where recall is off.
    by_position : PositionCurve
        Along the window.
    by_chunk_position : PositionCurve
        Along a chunk, over all chunks but the first (where both runs are the same).
    config : PrefillConfig
    protocol : str
    context : int
        Tokens of a window.
    windows : list of int
        The windows' indices in the text.
    scored_tokens : int
    """

    dense: RunResult
    sparse: RunResult
    delta_percent: float
    stderr_percent: float
    kl_mean: float
    top1_agreement: float
    attention_flops_ratio: float
    recalled_keys: float | None
    by_position: PositionCurve
    by_chunk_position: PositionCurve
    config: PrefillConfig
    protocol: str
    context: int
    windows: list[int]
    scored_tokens: int

    def __float__(self) -> float:
        return self.sparse.ppl

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dicts, lists and numbers."""
        return asdict(self)


def perplexity_report(result: PerplexityResult, **origin: Any) -> dict[str, Any]:
    """Return what `report.write_json` makes the file of an evaluation from.

    Parameters
    ----------
    result : PerplexityResult
    origin
        What the result does not know and a reader needs to repeat it: model, dtype, text.

    Returns
    -------
    dict
        `{environment, config, dense: {ppl, ppl_by_chunk, seconds, ...}, sparse: {the same},
        delta_percent, stderr_percent, ...}`
    """
    values = result.to_dict()
    config = {**origin, **{key: values.pop(key) for key in ("protocol", "context", "windows")}}
    config.update(values.pop("config"))
    return build_report(config, **values)
