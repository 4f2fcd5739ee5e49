"""`enable` on tiny models of several families: what disturbs a prompt changes none of its bits."""

import copy
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

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, enable

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


class Injected(RuntimeError):
    """An exception that no library raises by itself."""


@dataclass(frozen=True)
class Case:
    """A model, a prompt int64 [B, T], and settings."""

    name: str
    model: Any
    ids: Tensor
    config: PrefillConfig

    def cache(self) -> ChunkedPrefillCache:
        """Return an empty cache."""
        return ChunkedPrefillCache(config=self.model.config)

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
    """The same calls give the same, bit for bit, whatever happens in and between them."""
    case = draw_case(draw)
    model, ends = case.model, draw_calls(draw, case.ids.shape[1])
    stock, own = model(case.ids).logits, draw.chance(0.8)
    cache, expected = (case.cache() if own else DynamicCache(config=model.config) for _ in range(2))
    with enable(model, case.config) as handle:
        wanted = list(case.calls(ends, expected))
        for begin, end, same in zip([0, *ends], ends, wanted, strict=False):
            piece, what = case.ids[:, begin:end], f"{case.name}, [{begin}, {end}) again"
            if draw.chance(0.4):
                _fail(draw, judge, case, handle, piece, cache)
            logits = model(piece, past_key_values=cache).logits
            judge.finite(what, logits)
            judge.same(what, logits, same)
            removed = 0 if case.slides() else draw.integer(0, 2)
            for _ in range(removed):
                model(case.ids[:, :1], past_key_values=cache)
            if removed:
                cache.crop(-removed)
    _check_cache(judge, f"{case.name}, {len(ends)} calls again", cache, expected)
    judge.same(f"{case.name}: without us again", model(case.ids).logits, stock)
    hooked = any(x._forward_pre_hooks or x._forward_hooks for x in model.modules())
    judge.true("a hook is left on the model", not hooked)


def _check_cache(judge: Judge, what: str, cache: Any, expected: Any) -> None:
    """Check that two caches hold the same, bit for bit."""
    for index, (ours, theirs) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        where, length = f"{what}: layer {index}", theirs.get_seq_length()
        judge.true(f"{where}: length", ours.get_seq_length() == length)
        state, other = (getattr(x, "state", None) for x in (ours, theirs))
        judge.true(f"{where}: has a state", (state is None) == (other is None))
        if state is not None and other is not None:
            judge.same(f"{where}: memory set", state.memory, other.memory)
            judge.same(f"{where}: errors", state.errors, other.errors)
            judge.same(f"{where}: scores", state.scores, other.scores)
            judge.true(f"{where}: last chunk", state.last_chunk_begin == other.last_chunk_begin)
        if length:
            judge.same(f"{where}: keys", ours.keys, theirs.keys)
            judge.same(f"{where}: values", ours.values, theirs.values)
    if isinstance(expected, ChunkedPrefillCache):
        judge.same(f"{what}: token ids", cache.token_ids, expected.token_ids)


def _fail(draw: Draw, judge: Judge, case: Case, handle: Any, ids: Tensor, cache: Any) -> None:
    """Raise in the middle of a call: the cache is as it was."""
    before = copy.deepcopy(cache)
    kind = draw.choice([Injected, ValueError, KeyboardInterrupt])
    parts = [part for name, part in case.model.named_modules() if name.endswith((".0", "norm"))]
    part = draw.choice(parts)

    def fail(*_: Any) -> None:
        raise kind("injected")

    what, raised = f"{case.name}, {kind.__name__} after {type(part).__name__}", False
    with part.register_forward_hook(fail):
        try:
            case.model(ids, past_key_values=cache)
        except kind:
            raised = True
    judge.true(f"{what}: not raised", raised)
    if kind is KeyboardInterrupt:
        # torch calls no hook on it: what it left open ends with `disable` or the next forward.
        handle.disable()
        handle.enable()
    _check_cache(judge, f"{what}: the cache", cache, before)
