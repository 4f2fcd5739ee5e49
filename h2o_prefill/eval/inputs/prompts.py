"""Prompts as token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def encode_prompt(tokenizer: Any, text: str, *, chat: bool) -> Tensor:
    """Return the token ids of a prompt, int64 [1, T]; `chat` applies the chat template, if any."""
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
    """Return the token ids of one prompt, [T] or [1, T], as int64 [1, T]."""
    shape = list(input_ids.shape)
    if input_ids.is_floating_point() or shape not in (shape[-1:], [1, *shape[-1:]]):
        raise ValueError(
            f"input_ids must be token ids [1, T] or [T], got {input_ids.dtype} {shape}"
        )
    return input_ids.reshape(1, -1).to(torch.int64)


def random_ids(model: Any, length: int, generator: torch.Generator) -> Tensor:
    """Return random tokens of the model, int64 [1, length], on its device.

    They are as frequent as words of a text, by the Zipf-Mandelbrot law (1 / (rank + 2.7)), so that
    lexical recall finds about as many matches as in text.
    """
    embeddings = model.get_input_embeddings().weight
    vocabulary = embeddings.shape[0]
    weights = 1 / (torch.arange(1, vocabulary + 1) + 2.7)
    ranks = torch.multinomial(weights, length, replacement=True, generator=generator)
    ids = torch.randperm(vocabulary, generator=generator)[ranks]
    return ids.unsqueeze(0).to(embeddings.device)
