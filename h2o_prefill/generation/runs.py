"""Runs of a model: progress, settings, checks, and greedy generation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.presets import chosen_config
from h2o_prefill.vocabulary import check_ids

# Called with (steps done, steps in all, what runs next).
Progress = Callable[[int, int, str], None]

# Errors of single pieces of work: too little memory, logits that are not finite.
FAILURES = (RuntimeError, ArithmeticError, MemoryError)

# What stands for the model's own attention, where settings have names.
DENSE = "dense"


def report_progress(on_progress: Progress | None, done: int, total: int, what: str) -> None:
    """Call `on_progress`, if there is one."""
    if on_progress is not None:
        on_progress(done, total, what)


def count_steps(on_progress: Progress | None, total: int) -> Callable[[str], None]:
    """Return a function that reports the next of `total` steps, and finally that all are done."""
    steps = itertools.count()
    return lambda what: report_progress(on_progress, next(steps), total, what)


def prefill_mode(
    model: Any, config: PrefillConfig | None, *, tokenizer: Any = None, **options: Any
) -> AbstractContextManager[Any]:
    """Return a context of sparse prefill, dense if `config` is None; options as for `enable`."""
    if config is None:
        return contextlib.nullcontext()
    from h2o_prefill.hf import enable

    return enable(model, config, tokenizer=tokenizer, **options)


def sparse_at_any_length(config: PrefillConfig | str | None) -> PrefillConfig:
    """Return settings as `enable` takes them, by which short prompts are sparse too.

    Evaluations ask what sparse attention loses, and how fast it is, at any length.
    """
    config = chosen_config(config)
    return config.replace(min_prefill=None) if config.is_auto else config


def check_length(model: nn.Module, length: int, argument: str) -> None:
    """Raise ValueError for a prompt longer than the model was made for, or one without weights."""
    if next(model.parameters()).is_meta:
        raise ValueError("model must have weights, got one on the meta device")
    longest = _longest_text(model.config) if hasattr(model, "config") else None
    if longest is not None and length > longest:
        raise ValueError(
            f"{argument} must be <= {longest}, the longest that the model takes, got {length}"
        )


def _longest_text(config: Any) -> int | None:
    """Return how many tokens a model was made for, None if its config does not say."""
    from h2o_prefill.hf.kinds import moving_rope

    config = config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    rope = moving_rope(config)
    # Dynamic rotary embeddings are for any number.
    dynamic = rope is not None and rope["rope_type"] == "dynamic"
    return None if dynamic or not isinstance(longest, int) else longest


def check_model(model: nn.Module, length: int, argument: str) -> None:
    """Raise ValueError for a model that is enabled already, and the errors of `check_length`."""
    settings = getattr(model, "config", None)
    if getattr(settings, "_attn_implementation", None) == "h2o_prefill":
        raise ValueError(
            "model must have dense attention: it is under h2o_prefill.enable() already"
        )
    check_length(model, length, argument)


def check_chunks(config: PrefillConfig, tokens: int, argument: str) -> None:
    """Raise ValueError for a prompt in which nothing would be sparse: shorter than two chunks."""
    if not config.exact and tokens < 2 * config.chunk_size:
        raise ValueError(
            f"{argument} must be at least two chunks of {config.chunk_size} tokens, because within "
            f"the first chunk attention is dense, got {tokens}"
        )


def check_counts(argument: str, *values: Any) -> None:
    """Raise ValueError for what is no int of at least 1."""
    for value in values:
        if type(value) is not int or value < 1:
            raise ValueError(f"{argument} must be >= 1 and an int, got {value!r}")


def generate_greedily(model: Any, input_ids: Tensor, new_tokens: int, **options: Any) -> Any:
    """Return the output of `generate` for prompts, int64 [B, T], greedy unless options say else.

    Decoding is dense. Padded batches need an `attention_mask` among the options.
    """
    check_ids(input_ids, model)
    input_ids = input_ids.to(next(model.parameters()).device)
    greedy = {"do_sample": False, "return_dict_in_generate": False}
    return model.generate(
        input_ids,
        max_new_tokens=new_tokens,
        use_cache=True,
        **{"attention_mask": torch.ones_like(input_ids), **greedy, **options},
    )


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block; then each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
