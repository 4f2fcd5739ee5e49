"""`enable` on tiny models of several families: what disturbs a prompt changes none of its bits."""

from functools import cache as cached
from itertools import pairwise
from typing import Any

import torch
from compatibility.tiny_config import ORDINARY_IDS
from compatibility.tiny_model import build_tiny
from random_calls.draw import Draw, draw_calls, draw_settings
from random_calls.judge import Judge
from transformers import DynamicCache

from h2o_prefill import enable

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
LONGEST = 512
# The operators have no kernels for float64 and run as ATen calls, slowly.
LONGEST_FLOAT64 = 192
# Prompts that presets prefill sparsely, and how often they come.
LONGEST_OF_ALL, LONG_CHANCE = 2304, 0.04


@cached
def shared(name: str, dtype: torch.dtype) -> Any:
    """Return the model of this name and dtype that all items share."""
    kind = name.partition(",")[0]
    kind = kind if kind.endswith("Model") else f"{kind}ForCausalLM"
    common = {"max_position_embeddings": 2 * LONGEST_OF_ALL, "eos_token_id": None}
    return build_tiny(kind, **common, **CHANGES.get(name, {})).model.to(dtype)


def run_disturbed(draw: Draw, judge: Judge) -> None:
    """The same calls give the same, bit for bit, though tokens are decoded and cropped again."""
    name, dtype = draw.choice(FAMILIES), draw.choice(DTYPES)
    longest = LONGEST_OF_ALL if draw.chance(LONG_CHANCE) else LONGEST
    length = draw.size(2, LONGEST_FLOAT64 if dtype == torch.float64 else longest)
    ids = draw.ids(3 if draw.largest else draw.choice([1, 1, 1, 2, 3]), length, ORDINARY_IDS)
    model = shared(name, dtype)
    stock = model(ids).logits
    with enable(model, draw_settings(draw, length, 2)):
        plain, cache = (DynamicCache(config=model.config) for _ in range(2))
        # A sliding window drops keys, and keeps no state.
        most = 0 if any(getattr(layer, "is_sliding", False) for layer in cache.layers) else 2
        for begin, end in pairwise([0, *draw_calls(draw, length)]):
            rows, what = ids[:, begin:end], f"{name}, [{begin}, {end}) again"
            same, logits = (model(rows, past_key_values=x).logits for x in (plain, cache))
            judge.finite(what, logits)
            judge.same(what, logits, same)
            if removed := draw.integer(0, most):
                for _ in range(removed):
                    model(ids[:, :1], past_key_values=cache)
                cache.crop(-removed)
    judge.same(f"{name}: without us again", model(ids).logits, stock)
