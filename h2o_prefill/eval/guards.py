"""What a model and a prompt must be for dense and sparse runs to be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


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


def prompt_ids(input_ids: Tensor) -> Tensor:
    """Return the token ids of one prompt as int64 [1, T].

    Raises
    ------
    ValueError
        If they are no integers, or not of one prompt.
    """
    shape = list(input_ids.shape)
    if (
        input_ids.is_floating_point()
        or len(shape) not in (1, 2)
        or (len(shape) == 2 and shape[0] != 1)
    ):
        raise ValueError(
            f"input_ids must be token ids [1, T] or [T], got {input_ids.dtype} {shape}"
        )
    return input_ids.reshape(1, -1).to(torch.int64)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
