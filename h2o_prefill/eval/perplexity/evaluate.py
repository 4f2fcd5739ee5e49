"""Perplexity of a model under sparse prefill, against the same model dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import count_attention_flops
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.perplexity.key_tokens import find_key_tokens
from h2o_prefill.eval.perplexity.result import PerplexityResult, summarize
from h2o_prefill.eval.perplexity.scoring import WindowScores, score_window
from h2o_prefill.eval.perplexity.windows import model_windows, parse_windows, scored_rows
from h2o_prefill.eval.runs import check_chunks, count_kv_heads, count_layers
from h2o_prefill.generation.models import resolve_model
from h2o_prefill.generation.runs import Progress, count_steps, eval_mode, prefill_mode, settings_for
from h2o_prefill.generation.text import Corpus
from h2o_prefill.selection import SelectionRule, Selector


def evaluate_perplexity(
    model: nn.Module | str,
    dataset: Tensor | Sequence[int] | Corpus | str,
    chunk_config: PrefillConfig | str | None = None,
    *,
    tokenizer: Any = None,
    context: int = 4096,
    windows: str = "0:6",
    protocol: str = "gptq",
    key_tokens: bool = False,
    select: SelectionRule | None = None,
    on_progress: Progress | None = None,
) -> PerplexityResult:
    """Measure a model's perplexity dense and sparse on the same windows of a text.

    The text is tokenised once as a whole and cut into windows that do not overlap. The two runs of
    a window follow each other, and take turns in going first, so that their times can be compared.

    Parameters
    ----------
    model : nn.Module or str
        A causal language model with dense attention, or a name that `load_model` knows.
    dataset : Tensor, sequence of int, Corpus or str
        Tokens of a text; or a text, or the name of one that `load_text` knows, which need a
        tokenizer.
    chunk_config : PrefillConfig or str, optional
        Settings of the sparse run, as `enable` takes them. Default: those of `enable`.
    tokenizer : optional
        The model's. A model given by name brings its own.
    context : int
        Tokens of a window: at least two chunks.
    windows : str
        A slice "begin:end" of the windows.
    protocol : {"gptq", "llamacpp"}
        Which tokens are scored: all but the first of a window, or those of its second half.
        "llamacpp" also replaces each window's first token by the BOS token, if the tokenizer adds
        one.
    key_tokens : bool
        Whether to measure also on the tokens that need the long context (LongPPL), which takes
        dense runs of 2,048 tokens: about as long as the window again.
    select : callable, optional
        A selection rule for the sparse run, as `enable` takes it.
    on_progress : callable, optional
        Called with (forward passes done, passes in all, what runs next).

    Returns
    -------
    PerplexityResult
        With `.dense.ppl` and `.sparse.ppl`; as a float it is the sparse perplexity.

    Raises
    ------
    ValueError
        If a window is shorter than two chunks, the text is too short for the windows, an argument
        is out of its range, or the model already runs sparsely.
    ArithmeticError
        If a run gives logits that are not finite.
    """
    network, tokenizer = resolve_model(model, tokenizer, needs_tokenizer=False)
    config = settings_for(network, chunk_config)
    check_settings(config, context, windows, protocol)
    selected, batches = model_windows(network, dataset, tokenizer, context, windows, protocol)
    step = count_steps(on_progress, (3 if key_tokens else 2) * len(batches))
    with torch.no_grad(), eval_mode(network):
        runs = PairedRuns(
            network, tokenizer, selected, batches, protocol, wants_key_tokens=key_tokens
        )
        result = runs.evaluate(config, lambda index, what: step(f"window {index} {what}"), select)
    step("done")
    return result


class PairedRuns:
    """Dense and sparse runs of a model over the same windows."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        selected: range,
        batches: Tensor,
        protocol: str,
        keep_dense: bool = False,
        wants_key_tokens: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._forward = PromptForward(model)
        self._device = next(model.parameters()).device
        self._selected = selected
        self._batches = batches
        self._protocol = protocol
        self._wants_key_tokens = wants_key_tokens
        # For several evaluations: rows on the CPU, and seconds, by window.
        self._dense: dict[int, tuple[Tensor, float]] | None = {} if keep_dense else None

    def evaluate(
        self,
        config: PrefillConfig,
        step: Callable[[int, str], None],
        select: SelectionRule | None = None,
    ) -> PerplexityResult:
        """Run all windows; `step` gets a window, and "dense" or "sparse" before each forward.

        Before the short forwards that find key tokens, it gets "short".
        """
        from h2o_prefill.vocabulary import text_for

        context = self._batches.shape[1]
        rows = scored_rows(self._protocol, context)
        scores: list[WindowScores] = []
        seconds: list[tuple[float, float]] = []
        errors: list[dict[int, Tensor]] = []
        is_key: list[Tensor] = []
        selectors: list[Selector] = []
        for number, index in enumerate(self._selected):
            input_ids = self._batches[number].to(self._device)
            runs: dict[str, tuple[PromptLogits, float]] = {}
            # The two take turns in going first: what a first call costs must not fall on one alone.
            for name in ("dense", "sparse") if number % 2 == 0 else ("sparse", "dense"):
                if name == "dense":
                    runs[name] = self._run_dense(index, input_ids, step)
                else:
                    step(index, name)
                    options = {"tokenizer": self._tokenizer, "select": select}
                    with prefill_mode(self._model, config, **options) as handle:
                        runs[name] = self._forward(input_ids.unsqueeze(0))
                    errors.append(dict(handle.state.errors))
                    selectors += [] if select is None else [handle.state.select]
            dense, sparse = runs["dense"], runs["sparse"]
            scores.append(score_window(dense[0], sparse[0], input_ids, rows))
            scores[-1].check_finite(f"window {index}")
            seconds.append((dense[1], sparse[1]))
            if self._wants_key_tokens:
                step(index, "short")
                nll = scores[-1].dense_nll
                is_key.append(find_key_tokens(self._forward, input_ids, nll, rows))
        return summarize(
            scores,
            seconds,
            rows=rows,
            config=config,
            protocol=self._protocol,
            context=context,
            windows=list(self._selected),
            is_key=is_key,
            select=selectors[0].name if selectors else None,
            flops=count_attention_flops(
                self._batches,
                config,
                count_layers(self._model),
                count_kv_heads(self._model),
                text_for(self._tokenizer, config),
                errors,
                float(sum(x.dot_products for x in selectors)) if selectors else None,
            ),
        )

    def _run_dense(
        self, index: int, input_ids: Tensor, step: Callable[[int, str], None]
    ) -> tuple[PromptLogits, float]:
        if self._dense is not None and index in self._dense:
            kept, seconds = self._dense[index]
            return PromptLogits(kept.to(self._device), self._forward.head), seconds
        step(index, "dense")
        logits, seconds = self._forward(input_ids.unsqueeze(0))
        if self._dense is not None:
            self._dense[index] = logits.rows.cpu(), seconds
        return logits, seconds


def check_settings(config: PrefillConfig, context: int, windows: str, protocol: str) -> None:
    """Raise the errors of `evaluate_perplexity` that need neither a model nor a text."""
    scored_rows(protocol, context)
    parse_windows(windows)
    check_chunks(config, context, "context")
    if not (config.exact or config.memory_size or config.block_diagonal):
        raise ValueError(
            "sink_tokens, local_window and heavy_budget must not all be 0 unless block_diagonal is "
            "on: with an empty memory set every call is dense"
        )
