"""Prompts in the forms that users have them: tensors, lists, tokenizer output, embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model takes it."""

    name: str
    # int64 [B, T], or embeddings [B, T, hidden size].
    tokens: Tensor
    # [B, T_total], of the tokens in the cache as well.
    attention_mask: Tensor | None

    @property
    def length(self) -> int:
        """Tokens of the prompt, T."""
        return self.tokens.shape[1]

    def arguments(self, begin: int, end: int, past: int) -> dict[str, Tensor]:
        """Return the arguments of a call with tokens [begin, end), `past` tokens being cached."""
        arguments = {self.name: self.tokens[:, begin:end]}
        if self.attention_mask is not None:
            arguments["attention_mask"] = self.attention_mask[:, : past + end]
        return arguments


def read_prompt(
    prompt: Any, attention_mask: Tensor | None, inputs_embeds: Tensor | None, past: int, device: Any
) -> Prompt:
    """Read a prompt."""
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        prompt, given = prompt["input_ids"], prompt.get("attention_mask")
        attention_mask = given if attention_mask is None else attention_mask
    if (prompt is None) == (inputs_embeds is None):
        raise ValueError("either input_ids or inputs_embeds must be given")
    name, tokens = (
        ("input_ids", prompt) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    )
    tokens, dims = _as_rows(tokens, device), 2 if inputs_embeds is None else 3
    if tokens.ndim != dims or tokens.shape[1] == 0:
        what = "[B, T]" if dims == 2 else "[B, T, hidden size]"
        raise ValueError(f"{name} must be {what} with T >= 1, got {list(tokens.shape)}")
    if attention_mask is None:
        return Prompt(name, tokens, None)
    mask = _as_rows(attention_mask, tokens.device)
    if mask.shape == tokens.shape[:2] and past > 0:
        mask = torch.cat([mask.new_ones(mask.shape[0], past), mask], dim=1)
    if mask.shape != (tokens.shape[0], past + tokens.shape[1]):
        raise ValueError(
            f"attention_mask must be [{tokens.shape[0]}, {past + tokens.shape[1]}], "
            f"got {list(mask.shape)}"
        )
    return Prompt(name, tokens, mask)


def _as_rows(values: Any, device: Any) -> Tensor:
    """Return a tensor as it is, and lists as int64 rows."""
    if isinstance(values, Tensor):
        return values
    try:
        rows = torch.tensor(values, dtype=torch.int64, device=device)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"token ids must be a tensor, or lists of ints of equal length ({error})"
        ) from None
    return rows.unsqueeze(0) if rows.ndim == 1 else rows
