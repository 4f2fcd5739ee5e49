"""Tiny random models of several families, built once for each dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from compatibility.tiny_model import build_tiny

LONGEST = 2304
COMMON = {"max_position_embeddings": 2 * LONGEST, "eos_token_id": None}
FAMILIES = (
    *("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "GPTNeoX", "GPT2LMHeadModel"),
    *("Phi", "Phi3", "Olmo2", "StableLm", "Starcoder2", "Granite", "Cohere", "Mistral, sliding"),
)
# What differs from `tiny_config`.
CHANGES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": None},
    "Starcoder2": {"sliding_window": None},
    "Gemma2": {"attn_logit_softcapping": None},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def build(name: str, dtype: torch.dtype) -> Any:
    """Return a new model, the same weights for the same name."""
    kind = name.partition(",")[0]
    kind = kind if kind.endswith("Model") else f"{kind}ForCausalLM"
    return build_tiny(kind, **COMMON, **CHANGES.get(name, {})).model.to(dtype)


@cache
def shared(name: str, dtype: torch.dtype) -> Any:
    """Return the model of this name and dtype that all items share."""
    return build(name, dtype)


@cache
def implementation(name: str) -> str:
    """Return the attention implementation that transformers chooses for a family."""
    return build(name, torch.float32).config._attn_implementation
