"""Perplexity on windows in which a passage comes again in another form, sparse against dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.text import Corpus, as_corpus
from h2o_prefill.eval.inputs.variations import VARIATIONS, build_window
from h2o_prefill.eval.perplexity.estimates import perplexity, relative_difference
from h2o_prefill.eval.perplexity.evaluate import check_settings
from h2o_prefill.eval.perplexity.scoring import WindowScores, score_window
from h2o_prefill.eval.report import build_report
from h2o_prefill.eval.runs import (
    Progress,
    check_model,
    chosen_variants,
    count_steps,
    eval_mode,
    prefill_mode,
)


@dataclass(frozen=True)
class Loss:
    """What one variant loses on a range of tokens."""

    dense_ppl: float
    delta_percent: float  # sparse perplexity above dense
    stderr_percent: float  # its standard error (`estimates.relative_difference`)
    kl_mean: float  # mean KL(dense || sparse) of the next-token distributions, nats


@dataclass(frozen=True)
class VariationRow:
    """One variant on one window."""

    variation: str
    variant: str
    window: Loss  # on all tokens
    changed: Loss  # on those of the changed passage
    changed_tokens: int


@dataclass(frozen=True)
class VariationsResult:
    """Losses of every variant on every window."""

    rows: list[VariationRow]
    variants: dict[str, PrefillConfig]
    context: int  # tokens of a window
    text_source: str


def variations_report(result: VariationsResult, **origin: Any) -> dict[str, Any]:
    """Return the report of an evaluation; `origin` adds what else reproduces it: model, dtype."""
    values = asdict(result)
    rows = values.pop("rows")
    return build_report({**origin, **values}, rows=rows)


def measure_variations(
    model: nn.Module | str,
    text: Corpus | str = "wikitext2",
    variants: Mapping[str, PrefillConfig] | None = None,
    *,
    tokenizer: Any = None,
    variations: Sequence[str] = tuple(VARIATIONS),
    context: int = 4096,
    on_progress: Progress | None = None,
) -> VariationsResult:
    """Measure the loss where a passage comes again in another form: what tokens do not repeat.

    Lexical recall finds a passage that is repeated word for word. In these windows a passage of a
    quarter of the window is followed by other text and comes again in capitals, with another
    spelling, as code with other names, and so on (`inputs.variations.VARIATIONS`; "same" repeats it
    unchanged, for comparison).

    Parameters
    ----------
    model : nn.Module or str
        A causal language model with dense attention, or a name that `load_model` knows.
    text : Corpus or str
        A text, or the name of one that `load_text` knows, from which the windows are made.
    variants : mapping of str to PrefillConfig, optional
        Names and settings of the sparse runs. Default: that of `enable`, by its name.
    tokenizer : optional
        The model's. A model given by name brings its own.
    variations : sequence of str
        Of `VARIATIONS`.
    context : int
        Tokens of a window: at least two chunks.
    on_progress : callable, optional
        Called with (forward passes done, passes in all, what runs next).

    Returns
    -------
    VariationsResult

    Raises
    ------
    ValueError
        If an argument is out of its range, the text is too short, or the model already runs
        sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    ArithmeticError
        If a run gives logits that are not finite.
    """
    chosen = chosen_variants(variants)
    check_variations(chosen, variations, context)
    network, tokenizer = resolve_model(model, tokenizer)
    check_model(network, context, "context")
    corpus = as_corpus(text, "text")
    windows = {name: build_window(name, tokenizer, corpus.text, context) for name in variations}
    step = count_steps(on_progress, len(windows) * (1 + len(chosen)))
    device = next(network.parameters()).device
    rows: list[VariationRow] = []
    with torch.no_grad(), eval_mode(network):
        forward = PromptForward(network)
        for number, (name, (window, changed)) in enumerate(windows.items()):
            input_ids = window.to(device)
            step(f"{name} dense")
            dense, _ = forward(input_ids.unsqueeze(0))
            for variant, config in chosen.items():
                step(f"{name} {variant}")
                with prefill_mode(network, config, tokenizer=tokenizer, strict=True):
                    sparse, _ = forward(input_ids.unsqueeze(0))
                scores = score_window(dense, sparse, input_ids, range(context - 1))
                scores.check_finite(number)
                # The row before a token scores it.
                losses = _loss(scores, 0), _loss(scores, changed - 1)
                rows.append(VariationRow(name, variant, *losses, context - changed))
    step("done")
    return VariationsResult(rows, chosen, context, corpus.source)


def check_variations(
    variants: Mapping[str, PrefillConfig], variations: Sequence[str], context: int
) -> None:
    """Raise ValueError for settings that `measure_variations` would refuse, without a model."""
    if not variations or len(set(variations)) < len(variations):
        raise ValueError(
            f"variations must hold at least one value, each once, got {list(variations)}"
        )
    for name in variations:
        if name not in VARIATIONS:
            raise ValueError(f"variations must be of {tuple(VARIATIONS)}, got {name!r}")
    for config in variants.values():
        check_settings(config, context, "0:1", "gptq")


def _loss(scores: WindowScores, first: int) -> Loss:
    """Return the loss on the rows from `first` on."""
    dense, sparse, kl = (
        values[first:].unsqueeze(0) for values in (scores.dense_nll, scores.sparse_nll, scores.kl)
    )
    return Loss(perplexity(dense), *relative_difference(dense, sparse), kl.double().mean().item())
