"""Perplexity of a model under sparse prefill, beside the same model dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import count_attention_flops
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.text import Corpus
from h2o_prefill.eval.perplexity.result import PerplexityResult
from h2o_prefill.eval.perplexity.scoring import WindowScores, score_window
from h2o_prefill.eval.perplexity.summary import summarize
from h2o_prefill.eval.perplexity.windows import model_windows, parse_windows, scored_rows
from h2o_prefill.eval.runs import Progress, count_layers, eval_mode, prefill_mode, report_progress
from h2o_prefill.presets import chosen_config


def evaluate_perplexity(
    model: nn.Module | str,
    dataset: Tensor | Sequence[int] | Corpus | str,
    chunk_config: PrefillConfig | str | None = None,
    *,
    tokenizer: Any = None,
    context: int = 4096,
    windows: str = "0:6",
    protocol: str = "gptq",
    on_progress: Progress | None = None,
) -> PerplexityResult:
    """Measure a model's perplexity dense and sparse, window by window on the same windows.

    The text is tokenised once as a whole and cut into windows that do not overlap. Both runs of a
    window follow each other, each first in turn, so their times can be compared.

    Parameters
    ----------
    model : nn.Module or str
        A causal language model with dense attention, or a name that `load_model` knows.
    dataset : Tensor, sequence of int, Corpus or str
        Tokens of a text; or a text, or the name of one that `load_text` knows, which need a
        tokenizer.
    chunk_config : PrefillConfig or str, optional
        Settings of the sparse run. Default: that of `enable`.
    tokenizer : optional
        The model's. A model given by name brings its own.
    context : int
        Tokens of a window: at least two chunks.
    windows : str
        A slice "begin:end" of the windows.
    protocol : {"gptq", "llamacpp"}
        Which tokens are scored, see `windows.scored_rows`. "llamacpp" also puts the tokenizer's
        BOS token, if it adds one, in the place of each window's first token.
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
    config = chosen_config(chunk_config)
    check_settings(config, context, windows, protocol)
    rows = scored_rows(protocol, context)
    network, tokenizer = resolve_model(model, tokenizer)
    selected, batches = model_windows(network, dataset, tokenizer, context, windows, protocol)

    scores: list[WindowScores] = []
    seconds: list[tuple[float, float]] = []
    total = 2 * len(batches)
    with torch.no_grad(), eval_mode(network):
        forward = PromptForward(network)
        device = next(network.parameters()).device
        for index, batch in zip(selected, batches, strict=True):
            input_ids = batch.to(device)
            outputs: dict[str, tuple[PromptLogits, float]] = {}
            # Each goes first in turn: what a first call pays for must not fall on one of the two.
            order = ("dense", "sparse") if len(scores) % 2 == 0 else ("sparse", "dense")
            for name in order:
                report_progress(
                    on_progress, 2 * len(scores) + len(outputs), total, f"window {index} {name}"
                )
                with prefill_mode(network, config if name == "sparse" else None):
                    outputs[name] = forward(input_ids.unsqueeze(0))
            dense, sparse = outputs["dense"], outputs["sparse"]
            window = score_window(dense[0], sparse[0], input_ids, rows)
            window.check_finite(index)
            scores.append(window)
            seconds.append((dense[1], sparse[1]))
    report_progress(on_progress, total, total, "done")
    return summarize(
        scores,
        seconds,
        rows=rows,
        config=config,
        protocol=protocol,
        context=context,
        windows=list(selected),
        flops=count_attention_flops(batches, config, count_layers(network)),
    )


def check_settings(config: PrefillConfig, context: int, windows: str, protocol: str) -> None:
    """Refuse settings that `evaluate_perplexity` would refuse, without a model and a text.

    Parameters
    ----------
    config : PrefillConfig
    context, windows, protocol
        As `evaluate_perplexity` takes them.

    Raises
    ------
    ValueError
        If one is out of its range, a window is shorter than two chunks, or the memory set is empty
        without `block_diagonal`, so that nothing is sparse.
    """
    scored_rows(protocol, context)
    parse_windows(windows)
    if context < 2 * config.chunk_size:
        raise ValueError(
            f"context must be at least two chunks of {config.chunk_size} tokens, because within "
            f"the first chunk attention is dense, got {context}"
        )
    if not config.memory_size and not config.block_diagonal:
        raise ValueError(
            "sink_tokens, local_window and heavy_budget must not all be 0 unless block_diagonal is "
            "on: with an empty memory set every call is dense"
        )
