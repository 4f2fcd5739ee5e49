"""Helpers of comparisons of dense and sparse runs of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.runs import check_dense, check_length


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


def check_model(model: nn.Module, length: int, argument: str) -> None:
    """Raise the errors of `check_dense` and `check_length`."""
    check_dense(model)
    check_length(model, length, argument)


def count_heads(model: nn.Module) -> tuple[int, int]:
    """Return the decoder layers and their KV heads that a model's config names, 1 without it."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    layers, heads = (
        getattr(config, name, 1) or 1 for name in ("num_hidden_layers", "num_key_value_heads")
    )
    return layers, heads
