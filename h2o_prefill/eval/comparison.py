"""What sparse prefill brings on one prompt: seconds, what it changes, and the answer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.scores import format_change, relative_difference, score_window
from h2o_prefill.generation.prompts import prompt_ids
from h2o_prefill.generation.runs import (
    Progress,
    check_chunks,
    check_counts,
    check_length,
    count_steps,
    eval_mode,
    generate_greedily,
    prefill_mode,
)
from h2o_prefill.generation.text import encode
from h2o_prefill.presets import PRESETS, chosen_config
from h2o_prefill.vocabulary import check_tokenizer

# Letters of an answer in a table.
_SHOWN = 28

_EXACT = PRESETS["exact"].to_string()


@dataclass(frozen=True)
class ComparedRun:
    """A way to prefill the prompt of a comparison."""

    name: str
    settings: str  # a settings text; empty: the model's own attention
    seconds: float  # to the first token, median
    all_seconds: tuple[float, ...]  # of each run
    speedup: float  # seconds of the model's own attention over these
    kl_mean: float  # mean KL(own attention || this) of the next-token distributions, nats a token
    delta_percent: float  # perplexity of the prompt above that by the model's own attention
    stderr_percent: float  # its standard error, from blocks of tokens
    answer: str  # how the prompt goes on, greedily


@dataclass(frozen=True)
class Comparison:
    """A prompt by the model's own attention, by `exact` and by other settings. `str` is a table."""

    tokens: int  # of the prompt
    runs: tuple[ComparedRun, ...]
    seconds_without_attention: float  # median of prefills whose layers skip attention

    @property
    def attention_share(self) -> float:
        """Share of attention in the seconds of `exact`, in [0, 1]."""
        exact = next(run.seconds for run in self.runs if run.settings == _EXACT)
        return max(0.0, 1 - self.seconds_without_attention / exact)

    def __str__(self) -> str:
        heads = "", "seconds", "times as fast", "mean KL, nats"
        rows: list[tuple[str, ...]] = [(*heads, "perplexity", "answer")]
        for run in self.runs:
            answer = " ".join(run.answer.split())
            cut = answer if len(answer) <= _SHOWN else f"{answer[:_SHOWN].rstrip()}..."
            measured = f"{run.seconds:.2f}", f"{run.speedup:.2f}x"
            kl = f"{round(run.kl_mean, 4) + 0.0:.4f}"  # no sign where rounding takes it below zero
            lost = kl, format_change(run.delta_percent, run.stderr_percent)
            rows.append((run.name, *measured, *(lost if run.settings else ("", "")), cut))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        share = self.attention_share
        bound = f", so sparsity gains at most {1 / (1 - share):.2f}x over it" if share < 1 else ""
        note = f"attention takes {share:.0%} of exact{bound}"
        return "\n".join([f"{self.tokens} tokens, seconds to the first new one", *lines, note])


def compare(
    model: Any,
    inputs: Tensor | Sequence[int] | Mapping[str, Any] | str,
    *,
    tokenizer: Any = None,
    config: PrefillConfig | str | None = None,
    max_new_tokens: int = 16,
    repeats: int = 3,
    on_progress: Progress | None = None,
) -> Comparison:
    """Measure what `enable` brings on a prompt, and what it changes.

    The prompt is prefilled by the model's own attention, by the preset "exact" and by the settings
    of `enable`. They take turns, so that a machine that drifts slows all alike, with prefills that
    skip attention, which bound what sparsity could gain. A prefill computes the logits of the last
    token alone; one of each before that is not timed, and gives the distributions of all tokens.
    Where a model does more with its output layer than a product (softcap, scaling), their logits
    are kept whole.

    Parameters
    ----------
    model : PreTrainedModel
        It may be enabled: then the last settings are its own. In the end it is as it was, also
        after an error.
    inputs : Tensor, sequence of int, mapping or str
        A prompt of at least two chunks: int64 [T] or [1, T], what a tokenizer returned for it, or a
        text, which needs the tokenizer and gets no chat template.
    tokenizer : optional
        Without it, answers are token ids.
    max_new_tokens : int
        Tokens of the answers.
    repeats : int
        Timed runs of each.
    config, on_progress
        As in `h2o_prefill.eval`; `config` are the last settings.

    Returns
    -------
    Comparison
        `print` it for a table.

    Examples
    --------
    >>> print(compare(model, inputs, tokenizer=tokenizer))
    """
    check_counts("max_new_tokens", max_new_tokens)
    check_counts("repeats", repeats)
    from h2o_prefill.eval.observe import without_attention
    from h2o_prefill.hf.enable import paused

    with paused(model) as handle, torch.no_grad(), eval_mode(model):
        check_tokenizer(tokenizer)
        input_ids = _read_prompt(model, inputs, tokenizer).to(next(model.parameters()).device)
        tokens = input_ids.shape[1]
        enabled: Any = handle if config is None else None
        chosen = chosen_config(config) if enabled is None else enabled.config
        check_chunks(chosen, tokens, "the prompt")
        stock = f"{model.config._attn_implementation}, model's own"
        modes = {stock: None, "exact, lossless": PRESETS["exact"]}
        if not chosen.exact:
            modes[chosen.to_string()] = chosen

        def switched(settings: PrefillConfig | None) -> Any:
            own = enabled is not None and settings is chosen
            return enabled if own else prefill_mode(model, settings, tokenizer=tokenizer)

        check_length(model, tokens + max_new_tokens, "prompt and new tokens")
        forward = PromptForward(model)
        step = count_steps(on_progress, len(modes) * (repeats + 2) + repeats)
        baseline: PromptLogits | None = None
        # Mean KL, change of perplexity and its error; none of the first run.
        changes: dict[str, tuple[float, float, float]] = {}
        answers: dict[str, str] = {}
        for name, settings in modes.items():
            with switched(settings):
                step(f"{tokens} tokens, {name}")
                logits, _ = forward(input_ids)
                step(f"answer, {name}")
                made = generate_greedily(model, input_ids, max_new_tokens)
            ids = made[0, tokens:]
            if tokenizer is None:
                answers[name] = " ".join(map(str, ids.tolist()))
            else:
                answers[name] = str(tokenizer.decode(ids, skip_special_tokens=True))
            if baseline is None:
                baseline = logits
                changes[name] = 0.0, 0.0, 0.0
            else:
                scores = score_window(baseline, logits, input_ids[0], range(tokens - 1))
                scores.check_finite("the prompt")
                nll = scores.dense_nll.unsqueeze(0), scores.sparse_nll.unsqueeze(0)
                changes[name] = scores.kl.double().mean().item(), *relative_difference(*nll)
            del logits  # before the next ones are made
        seconds: dict[str, list[float]] = {name: [] for name in modes}
        bare = []
        for _ in range(repeats):
            for name, settings in modes.items():
                step(f"{tokens} tokens, {name}")
                with switched(settings):
                    seconds[name].append(forward.prefill(input_ids))
            step(f"{tokens} tokens without attention")
            with without_attention(model):
                bare.append(forward.prefill(input_ids))
        step("done")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(medians.values()))
    runs = []
    for name, settings in modes.items():
        text = "" if settings is None else settings.to_string()
        times = medians[name], tuple(seconds[name]), first / medians[name]
        runs.append(ComparedRun(name, text, *times, *changes[name], answers[name]))
    return Comparison(tokens, tuple(runs), statistics.median(bare))


def _read_prompt(model: Any, inputs: Any, tokenizer: Any) -> Tensor:
    """Return the token ids of a prompt, int64 [1, T]."""
    from h2o_prefill.hf.prefill import read_prompt

    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("inputs is text, so a tokenizer must be given")
        inputs = encode(tokenizer, inputs)
    return prompt_ids(read_prompt(inputs, None, None, 0, model)[1])
