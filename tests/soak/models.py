"""`enable` on tiny models of several families: what disturbs a prompt changes none of its bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from compatibility.tiny_config import ORDINARY_IDS
from compatibility.tiny_model import build_tiny
from random_calls.draw import Draw, draw_calls, draw_settings
from random_calls.judge import Judge
from torch import Tensor
from transformers import DynamicCache

from h2o_prefill import PrefillConfig, enable

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


@cache
def shared(name: str, dtype: torch.dtype) -> Any:
    """Return the model of this name and dtype that all items share."""
    kind = name.partition(",")[0]
    kind = kind if kind.endswith("Model") else f"{kind}ForCausalLM"
    common = {"max_position_embeddings": 2 * LONGEST_OF_ALL, "eos_token_id": None}
    return build_tiny(kind, **common, **CHANGES.get(name, {})).model.to(dtype)


@dataclass(frozen=True)
class Case:
    """A model, a prompt int64 [B, T], and settings."""

    name: str
    model: Any
    ids: Tensor
    config: PrefillConfig

    def calls(self, ends: list[int], cache: Any) -> Iterator[Tensor]:
        """Return the logits of calls that end there."""
        for begin, end in zip([0, *ends], ends, strict=False):
            yield self.model(self.ids[:, begin:end], past_key_values=cache).logits

    def slides(self) -> bool:
        """Return whether layers have a sliding window: they drop keys, and keep no state."""
        layers = DynamicCache(config=self.model.config).layers
        return any(getattr(layer, "is_sliding", False) for layer in layers)


def draw_case(draw: Draw) -> Case:
    """Draw a model, a prompt and settings."""
    name, dtype = draw.choice(FAMILIES), draw.choice(DTYPES)
    longest = LONGEST_OF_ALL if draw.chance(LONG_CHANCE) else LONGEST
    length = draw.size(2, LONGEST_FLOAT64 if dtype == torch.float64 else longest)
    ids = draw.ids(3 if draw.largest else draw.choice([1, 1, 1, 2, 3]), length, ORDINARY_IDS)
    return Case(name, shared(name, dtype), ids, draw_settings(draw, length, 2))


def run_disturbed(draw: Draw, judge: Judge) -> None:
    """The same calls give the same, bit for bit, though tokens are decoded and cropped again."""
    case = draw_case(draw)
    model, ends = case.model, draw_calls(draw, case.ids.shape[1])
    stock = model(case.ids).logits
    with enable(model, case.config):
        wanted = case.calls(ends, DynamicCache(config=model.config))
        cache = DynamicCache(config=model.config)
        for begin, end, same in zip([0, *ends], ends, wanted, strict=False):
            logits = model(case.ids[:, begin:end], past_key_values=cache).logits
            judge.finite(f"{case.name}, [{begin}, {end}) again", logits)
            judge.same(f"{case.name}, [{begin}, {end}) again", logits, same)
            removed = 0 if case.slides() else draw.integer(0, 2)
            for _ in range(removed):
                model(case.ids[:, :1], past_key_values=cache)
            if removed:
                cache.crop(-removed)
    judge.same(f"{case.name}: without us again", model(case.ids).logits, stock)
