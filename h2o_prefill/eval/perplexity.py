"""Perplexity of a model under sparse prefill, against the same model dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import count_attention_flops
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.report import build_report
from h2o_prefill.eval.scores import (
    WindowScores,
    perplexity,
    relative_difference,
    score_window,
)
from h2o_prefill.generation.models import resolve_model
from h2o_prefill.generation.runs import (
    Progress,
    check_chunks,
    check_model,
    count_steps,
    eval_mode,
    prefill_mode,
    sparse_at_any_length,
)
from h2o_prefill.generation.text import Corpus, as_corpus, encode, parse_windows, select_windows
from h2o_prefill.hf.kinds import count_heads
from h2o_prefill.vocabulary import text_for


@dataclass(frozen=True)
class RunResult:
    """Perplexity of the dense or the sparse run."""

    ppl: float  # over all scored tokens
    ppl_by_chunk: list[float]  # of each chunk of a window
    ppl_by_window: list[float]
    seconds: float  # of the forward calls of all windows, without the output layer's logits


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity sparse and dense on the same windows; as a float, the sparse one."""

    dense: RunResult
    sparse: RunResult
    delta_percent: float  # sparse perplexity above dense, in percent
    # Standard error of delta_percent, from paired differences (`relative_difference`).
    stderr_percent: float
    kl_mean: float  # mean KL(dense || sparse) of the next-token distributions, nats
    top1_agreement: float  # share of rows for which both runs have the same most likely token
    # Query-key products of dense attention over sparse attention's, in all windows.
    attention_flops_ratio: float
    # By which errors have multiplied L and H, mean of chunks, KV heads and windows; None where
    # `error_rows` is 0.
    widening: float | None
    recalled_keys: float | None  # that a row sees, mean of all rows; None where recall is off
    config: PrefillConfig
    context: int  # tokens of a window
    windows: list[int]  # their indices in the text
    scored_tokens: int  # all but the first of each window

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
    names = "context", "windows"
    config = {**origin, **{key: values.pop(key) for key in names}}
    config.update(values.pop("config"))
    return build_report(config, **values)


def evaluate_perplexity(
    model: nn.Module | str,
    dataset: Tensor | Sequence[int] | Corpus | str,
    chunk_config: PrefillConfig | str | None = None,
    *,
    tokenizer: Any = None,
    context: int = 4096,
    windows: str = "0:6",
    on_progress: Progress | None = None,
) -> PerplexityResult:
    """Measure a model's perplexity dense and sparse on the same windows of a text.

    The text is tokenised once as a whole and cut into windows that do not overlap. The two runs of
    a window follow each other, and take turns in going first, so that their times can be compared.

    Parameters
    ----------
    dataset : Tensor, sequence of int, Corpus or str
        Tokens, or a text.
    model, chunk_config, tokenizer, context, windows, on_progress
        As in `h2o_prefill.eval`.

    Returns
    -------
    PerplexityResult
        With `.dense.ppl` and `.sparse.ppl`; as a float it is the sparse perplexity.
    """
    network, tokenizer = resolve_model(model, tokenizer, needs_tokenizer=False)
    config = sparse_at_any_length(chunk_config)
    check_settings(config, context, windows)
    selected, batches = _model_windows(network, dataset, tokenizer, context, windows)
    step = count_steps(on_progress, 2 * len(batches))
    with torch.no_grad(), eval_mode(network):
        runs = PairedRuns(network, tokenizer, selected, batches)
        result = runs.evaluate(config, lambda index, what: step(f"window {index} {what}"))
    step("done")
    return result


def _model_windows(
    model: nn.Module,
    dataset: Tensor | Sequence[int] | Corpus | str,
    tokenizer: Any,
    context: int,
    windows: str,
) -> tuple[range, Tensor]:
    """Return the windows of a dataset; raise if the model takes none of this length."""
    check_model(model, context, "context")
    if isinstance(dataset, (str, Corpus)):
        corpus = as_corpus(dataset, "dataset")
        if tokenizer is None:
            raise ValueError("dataset is text, so a tokenizer must be given")
        tokens = encode(tokenizer, corpus.text)
    else:
        tokens = torch.as_tensor(dataset)
    if tokens.is_floating_point() or tokens.dim() != 1:
        raise ValueError(
            f"dataset must be a sequence of token ids, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    return select_windows(tokens.long(), context, windows)


@dataclass
class PairedRuns:
    """Dense and sparse runs of a model over the same windows."""

    model: nn.Module
    tokenizer: Any
    selected: range  # the windows, and their tokens
    batches: Tensor
    keep_dense: bool = False  # for several evaluations

    def __post_init__(self) -> None:
        self._forward = PromptForward(self.model)
        self._device = next(self.model.parameters()).device
        self._rows = range(self.batches.shape[1] - 1)  # all whose next token is in the window
        self._dense: dict[int, tuple[Tensor, float]] = {}  # rows on the CPU, and seconds, by window

    def evaluate(
        self,
        config: PrefillConfig,
        step: Callable[[int, str], None],
    ) -> PerplexityResult:
        """Run all windows; `step` gets a window, and "dense" or "sparse" before each forward."""
        windows: list[WindowScores] = []
        seconds: dict[str, list[float]] = {"dense": [], "sparse": []}
        errors: list[dict[int, Tensor]] = []
        for number, index in enumerate(self.selected):
            input_ids = self.batches[number].to(self._device)
            logits: dict[str, PromptLogits] = {}
            # The two take turns in going first: what a first call costs must not fall on one alone.
            for name in ("dense", "sparse") if number % 2 == 0 else ("sparse", "dense"):
                if name == "dense":
                    logits[name], took = self._run_dense(index, input_ids, step)
                else:
                    step(index, name)
                    with prefill_mode(self.model, config, tokenizer=self.tokenizer) as handle:
                        logits[name], took = self._forward(input_ids.unsqueeze(0))
                    errors.append(dict(handle.state.errors))
                seconds[name].append(took)
            windows.append(score_window(logits["dense"], logits["sparse"], input_ids, self._rows))
            windows[-1].check_finite(f"window {index}")
        flops = count_attention_flops(
            self.batches,
            config,
            *count_heads(self.model),
            text_for(self.tokenizer, config),
            errors,
        )
        scores = WindowScores(*map(torch.stack, zip(*windows, strict=True)))
        dense, sparse = scores.dense_nll, scores.sparse_nll
        delta_percent, stderr_percent = relative_difference(dense, sparse)
        return PerplexityResult(
            dense=_run_result(dense, seconds["dense"], config),
            sparse=_run_result(sparse, seconds["sparse"], config),
            delta_percent=delta_percent,
            stderr_percent=stderr_percent,
            kl_mean=scores.kl.double().mean().item(),
            top1_agreement=scores.same_top1.double().mean().item(),
            attention_flops_ratio=flops.ratio,
            widening=flops.widening,
            recalled_keys=flops.recalled_keys,
            config=config,
            context=self.batches.shape[1],
            windows=list(self.selected),
            scored_tokens=dense.numel(),
        )

    def _run_dense(
        self, index: int, input_ids: Tensor, step: Callable[[int, str], None]
    ) -> tuple[PromptLogits, float]:
        if index in self._dense:
            rows, seconds = self._dense[index]
            return PromptLogits(rows.to(self._device), self._forward.head), seconds
        step(index, "dense")
        logits, seconds = self._forward(input_ids.unsqueeze(0))
        if self.keep_dense:
            self._dense[index] = logits.rows.cpu(), seconds
        return logits, seconds


def _run_result(nll: Tensor, seconds: list[float], config: PrefillConfig) -> RunResult:
    return RunResult(
        ppl=perplexity(nll),
        ppl_by_chunk=[perplexity(rows) for rows in nll.split(config.chunk_size, dim=1)],
        ppl_by_window=[perplexity(window) for window in nll],
        seconds=sum(seconds),
    )


def check_settings(config: PrefillConfig, context: int, windows: str) -> None:
    """Raise the errors of `evaluate_perplexity` that need neither a model nor a text."""
    parse_windows(windows)
    check_chunks(config, context, "context")
    if not (config.exact or config.memory_size):
        raise ValueError(
            "sink_tokens, local_window and heavy_budget must not all be 0: with an empty memory "
            "set every call is dense"
        )
