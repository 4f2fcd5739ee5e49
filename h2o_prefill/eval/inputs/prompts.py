"""Prompts as token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def encode_prompt(tokenizer: Any, text: str, *, chat: bool) -> Tensor:
    """Return the token ids of a prompt, int64 [1, T]."""
    if chat and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        encoded = tokenizer(text, return_tensors="pt", verbose=False)
    ids: Tensor = encoded["input_ids"]
    return ids


def prompt_ids(input_ids: Tensor) -> Tensor:
    """Return the token ids of one prompt as int64 [1, T]."""
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


def random_ids(model: Any, length: int, generator: torch.Generator) -> Tensor:
    """Return int64 [1, length] of the model's tokens, on its device.

    Tokens are as frequent as words of a text, by the law of Zipf and Mandelbrot (1 / (rank + 2.7)):
    lexical recall finds about as much as in text, and in uniformly random tokens nothing.
    """
    embeddings = model.get_input_embeddings().weight
    vocabulary = embeddings.shape[0]
    weights = 1 / (torch.arange(1, vocabulary + 1) + 2.7)
    ranks = torch.multinomial(weights, length, replacement=True, generator=generator)
    ids = torch.randperm(vocabulary, generator=generator)[ranks]
    return ids.unsqueeze(0).to(embeddings.device)
