"""Models with the layers of known ones, few of them and with random weights, for timing alone."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers

from h2o_prefill.generation import load_model

# A layer of full attention, and those with windows before it. Small vocabularies: the embedding
# of a prompt costs the same, and a model in memory less.
_SHARED = {"vocab_size": 4096, "pad_token_id": 0, "max_position_embeddings": 131072}
_GEMMA3_1B = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
_GPT_OSS_20B = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
}
_QWEN2_5_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
_LLAMA3_2_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}
_LLAMA3_2_3B = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
}
_LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
}
RANDOM_MODELS = {
    "gemma3-1b-layers": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA3_1B),
    "gpt-oss-20b-layers": ("GptOssConfig", "GptOssForCausalLM", _GPT_OSS_20B),
    "qwen2.5-1.5b-layers": ("Qwen2Config", "Qwen2ForCausalLM", _QWEN2_5_1_5B),
    "llama3.2-1b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA3_2_1B,
            "num_hidden_layers": 16,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "llama3.2-1b-layers": ("LlamaConfig", "LlamaForCausalLM", _LLAMA3_2_1B),
    "llama3.2-3b-layers": ("LlamaConfig", "LlamaForCausalLM", _LLAMA3_2_3B),
    "llama3-8b-layers": ("LlamaConfig", "LlamaForCausalLM", _LLAMA3_8B),
}


def random_model(name: str, dtype: torch.dtype, layers: int | None = None, **more: Any) -> Any:
    """Return one of `RANDOM_MODELS`, with its own number of layers or another one.

    `more` are fields of its config.
    """
    config, model, sizes = RANDOM_MODELS[name]
    sizes = {**_SHARED, **sizes, **more}
    if layers is not None:
        sizes["num_hidden_layers"] = layers
        if types := sizes.get("layer_types"):
            sizes["layer_types"] = list(islice(cycle(types), layers))
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made.to(dtype).eval()


def write_random_model(name: str, dtype: torch.dtype, layers: int | None, folder: Path) -> Path:
    """Write a random model with the tokenizer of SmolLM2 under `folder`; return where it is."""
    path = folder / f"{name}-{layers or 'all'}"
    if not path.exists():
        tokenizer = load_model()[1]
        vocabulary = max(len(tokenizer), RANDOM_MODELS[name][2].get("vocab_size", 0))
        random_model(name, dtype, layers, vocab_size=vocabulary).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path
