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


# What an answer is to a chat template, to find where the next turn begins.
_ANSWER = "<h2o_prefill answer>"


def encode_turn(tokenizer: Any, text: str, past: Tensor | None, *, chat: bool) -> Tensor:
    """Return the token ids that a text adds to earlier ones, int64 [1, T]: a prompt without any.

    `chat` makes it a turn of the user, after an answer that `past` [1, T] ends with: what the chat
    template puts after an answer comes first, but for the end token where `past` has it.
    """
    if past is None or past.shape[1] == 0:
        return encode_prompt(tokenizer, text, chat=chat)
    if chat and getattr(tokenizer, "chat_template", None):
        text = turn_text(tokenizer, text) or text
    ids = encode_continuation(tokenizer, text)
    ended = chat and past[0, -1] == tokenizer.eos_token_id
    return ids[:, 1:] if ended and ids[0, :1].equal(past[0, -1:].cpu()) else ids


def encode_continuation(tokenizer: Any, text: str) -> Tensor:
    """Return the tokens of a text that goes on, int64 [1, T]: no special ones are added."""
    encoded = tokenizer(text, return_tensors="pt", verbose=False, add_special_tokens=False)
    ids: Tensor = encoded["input_ids"].to(torch.int64)
    return ids


def turn_text(tokenizer: Any, text: str) -> str:
    """Return what the chat template puts after an answer if the user says `text` then."""
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": text},
    ]
    shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return str(shown).partition(_ANSWER)[2]


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
