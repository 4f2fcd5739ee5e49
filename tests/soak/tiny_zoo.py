"""Tiny random models of several families, built once for each dtype."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 61
LONGEST = 2304
LAYERS = 2
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large weights: with the usual 0.02 attention is nearly uniform and hides mistakes.
    "initializer_range": 0.2,
}
MIXED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

# name: (config class, model class, what differs from COMMON)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**MIXED, "head_dim": 16, "attn_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**MIXED, "head_dim": 16}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_positions": 2 * LONGEST, **NO_DROPOUT}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
}
NAMES = [name for name, (_, model, _) in FAMILIES.items() if hasattr(transformers, model)]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_built: dict[tuple[str, torch.dtype], Any] = {}
_implementations: dict[str, str] = {}


def build_all() -> None:
    """Build every model that items share."""
    for name in NAMES:
        for dtype in DTYPES:
            shared(name, dtype)


def build(name: str, dtype: torch.dtype) -> Any:
    """Return a new model, the same weights for the same name."""
    config_name, model_name, differs = FAMILIES[name]
    config = getattr(transformers, config_name)(**{**COMMON, **differs})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, model_name)(config)
    return model.eval().to(dtype)


def shared(name: str, dtype: torch.dtype) -> Any:
    """Return the model of this name and dtype that all items share."""
    if (name, dtype) not in _built:
        _built[name, dtype] = build(name, dtype)
    return _built[name, dtype]


def implementation(name: str) -> str:
    """Return the attention implementation that transformers chooses for a family."""
    if name not in _implementations:
        _implementations[name] = build(name, torch.float32).config._attn_implementation
    return _implementations[name]
