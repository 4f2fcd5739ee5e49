"""What a model must be for dense and sparse runs of it to be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


def check_dense(model: nn.Module) -> None:
    """Refuse a model that already runs sparsely.

    Raises
    ------
    ValueError
        If it does.
    """
    settings = getattr(model, "config", None)
    if getattr(settings, "_attn_implementation", None) == "h2o_prefill":
        raise ValueError(
            "model must have dense attention: it is under h2o_prefill.enable() already"
        )


def check_length(model: nn.Module, length: int, argument: str) -> None:
    """Refuse a prompt that is longer than the model takes.

    Parameters
    ----------
    model : nn.Module
    length : int
        Tokens of the prompt.
    argument : str
        What the user called it, for the error.

    Raises
    ------
    ValueError
        If it is longer than the config's `max_position_embeddings`.
    """
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise ValueError(
            f"{argument} must be <= {longest}, the longest that the model takes, got {length}"
        )


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
