"""Helpers of all comparisons of dense and sparse runs of a model."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.presets import PRESETS

# Called with (steps done, steps in all, what runs next).
Progress = Callable[[int, int, str], None]

# The name of the baseline among those of variants.
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


def settings_for(model: Any, config: PrefillConfig | str | None) -> PrefillConfig:
    """Return settings as `enable` takes them for a model: of its profile, where none are given."""
    from h2o_prefill.profile import settings_of

    return settings_of(model, config)[0]


def chosen_variants(
    model: Any, variants: Mapping[str, PrefillConfig] | None
) -> dict[str, PrefillConfig]:
    """Return the settings to compare with dense prefill by name, by default those of `enable`."""
    if variants is None:
        from h2o_prefill.profile import settings_name

        config = settings_for(model, None)
        return {settings_name(model, config): config}
    if DENSE in variants:
        raise ValueError(f"variants must not be named {DENSE!r}, which is the baseline's name")
    return dict(variants)


def with_dense(variants: Mapping[str, PrefillConfig]) -> dict[str, PrefillConfig]:
    """Return the runs of a comparison without times: the baseline, lossless and faster, first."""
    return {DENSE: PRESETS["exact"], **variants}


def last_logits_only(model: nn.Module) -> dict[str, int]:
    """Return the argument that makes a model compute the logits of the last token only, if any."""
    parameters = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}


def check_dense(model: nn.Module) -> None:
    """Raise ValueError for a model that is enabled already."""
    settings = getattr(model, "config", None)
    if getattr(settings, "_attn_implementation", None) == "h2o_prefill":
        raise ValueError(
            "model must have dense attention: it is under h2o_prefill.enable() already"
        )


def check_chunks(config: PrefillConfig, tokens: int, argument: str) -> None:
    """Raise ValueError for a prompt in which nothing would be sparse: shorter than two chunks."""
    if not config.exact and tokens < 2 * config.chunk_size:
        raise ValueError(
            f"{argument} must be at least two chunks of {config.chunk_size} tokens, because within "
            f"the first chunk attention is dense, got {tokens}"
        )


def check_length(model: nn.Module, length: int, argument: str) -> None:
    """Raise ValueError for a prompt longer than the model's `max_position_embeddings`."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise ValueError(
            f"{argument} must be <= {longest}, the longest that the model takes, got {length}"
        )


def check_model(model: nn.Module, length: int, argument: str) -> None:
    """Raise the errors of `check_dense` and `check_length`."""
    check_dense(model)
    check_length(model, length, argument)


def generate_greedily(model: Any, input_ids: Tensor, new_tokens: int, **options: Any) -> Any:
    """Return the output of `generate` for prompts, int64 [B, T], greedy unless options say else.

    Decoding is dense. Padded batches need an `attention_mask` among the options.
    """
    input_ids = input_ids.to(next(model.parameters()).device)
    return model.generate(
        input_ids,
        max_new_tokens=new_tokens,
        use_cache=True,
        **{"attention_mask": torch.ones_like(input_ids), "do_sample": False, **options},
    )


def end_tokens(model: Any) -> list[int]:
    """Return the tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def count_layers(model: nn.Module) -> int:
    """Return the decoder layers that a model's config names, 1 if it names none."""
    return _count(model, "num_hidden_layers")


def count_kv_heads(model: nn.Module) -> int:
    """Return the KV heads of a layer that a model's config names, 1 if it names none."""
    return _count(model, "num_key_value_heads")


def _count(model: nn.Module, name: str) -> int:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    return getattr(config, name, 1) or 1
