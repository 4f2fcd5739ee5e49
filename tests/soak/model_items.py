"""`enable` on Hugging Face models: dense if the memory holds all, in calls, cropped, generating."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import tiny_zoo
import torch
from draws import DTYPES, Draw, draw_calls, draw_settings
from judge import FLOAT64_TOLERANCE, MIXED_TOLERANCE, Judge
from torch import Tensor
from transformers import DynamicCache

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, chunked_prefill, enable

LONGEST = 512
# The operators have no kernels for float64 and run as ATen calls, slowly.
LONGEST_FLOAT64 = 192
# Prompts that presets prefill sparsely.
LONG_CHANCE = 0.04


@dataclass(frozen=True)
class Case:
    """A model, a prompt int64 [B, T], and settings."""

    name: str
    model: Any
    ids: Tensor
    config: PrefillConfig

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.ids.shape[1]

    def cache(self) -> ChunkedPrefillCache:
        """Return an empty cache."""
        return ChunkedPrefillCache(config=self.model.config)


def draw_case(draw: Draw, whole: bool, dtype: torch.dtype | None = None) -> Case:
    """Draw a model, a prompt and settings."""
    name = draw.choice(tiny_zoo.NAMES)
    dtype = draw.choice(DTYPES) if dtype is None else dtype
    # Models come and go in a process too.
    model = (tiny_zoo.build if draw.chance(0.1) else tiny_zoo.shared)(name, dtype)
    longest = tiny_zoo.LONGEST if draw.chance(LONG_CHANCE) else LONGEST
    length = draw.size(2, LONGEST_FLOAT64 if dtype == torch.float64 else longest)
    batch = 3 if draw.largest else draw.choice([1, 1, 1, 2, 3])
    ids = torch.randint(
        3, tiny_zoo.VOCABULARY, (batch, length), generator=draw.generator(), dtype=torch.int64
    )
    return Case(name, model, ids, draw_settings(draw, length, tiny_zoo.LAYERS, whole))


def run_whole_memory(draw: Draw, judge: Judge) -> None:
    """With memory sets that hold everything a model gives what it gives without us."""
    case = draw_case(draw, whole=True)
    stock = stock_logits(case)
    truth = stock
    if case.model.dtype != torch.float64:
        truth = tiny_zoo.shared(case.name, torch.float64)(case.ids).logits
    cache = case.cache()
    ids_known = True
    handle = enable(case.model, case.config)
    try:
        logits, begin = [], 0
        for end in draw_calls(draw, 0, case.length):
            if draw.chance(0.2):
                ids_known &= _toggle(draw, judge, case, handle)
            piece = case.ids[:, begin:end]
            logits.append(case.model(piece, past_key_values=cache).logits)
            begin = end
            if draw.chance(0.2):
                cache = _copy(draw, cache)
            if not handle.active:
                handle.enable()
            if draw.chance(0.2):
                begin -= _crop(draw, cache, logits)
        if begin < case.length:
            logits.append(case.model(case.ids[:, begin:], past_key_values=cache).logits)
    finally:
        handle.disable()
    what = f"{case.name}, whole memory"
    judge.close(what, torch.cat(logits, 1), truth.double(), stock, of_model=True)
    if ids_known:
        judge.same(f"{what}: ids of the cache", cache.token_ids, case.ids)
    judge.same(f"{what}: without us again", stock_logits(case), stock)
    check_untouched(judge, case.name, case.model)


def run_calls(draw: Draw, judge: Judge) -> None:
    """In float64, where no two scores are nearly equal: calls, rows and helpers give the same."""
    case = draw_case(draw, whole=False, dtype=torch.float64)
    config = case.config.replace(dense_tail=0)
    # Calls that are too short to be sparse would make a difference, as those of one token are.
    least = max(2, config.sparse_from)
    ends = draw_calls(draw, 0, case.length, -(-least // config.chunk_size) * config.chunk_size)
    if len(ends) > 1 and ends[-1] - ends[-2] < least:
        del ends[-2]
    with enable(case.model, config):
        expected = case.cache()
        whole = case.model(case.ids, past_key_values=expected).logits
        cache, begin, logits = case.cache(), 0, []
        for end in ends:
            logits.append(case.model(case.ids[:, begin:end], past_key_values=cache).logits)
            begin = end
        row = draw.integer(0, case.ids.shape[0] - 1)
        alone = case.model(case.ids[row : row + 1], past_key_values=case.cache()).logits
    # Eager attention takes its softmax in float32.
    eager = tiny_zoo.implementation(case.name) == "eager"
    tolerance = MIXED_TOLERANCE if eager else FLOAT64_TOLERANCE
    judge.nearly(f"{case.name}, calls to {ends}", torch.cat(logits, 1), whole, tolerance)
    judge.nearly(f"{case.name}, row {row} alone", alone, whole[row : row + 1], tolerance)
    same_memory(judge, f"{case.name}, calls", cache, expected)
    prefilled = chunked_prefill(case.model, case.ids, config, chunks_per_call=draw.integer(1, 5))
    last = prefilled.logits[:, -1:]
    judge.nearly(f"{case.name}, chunked_prefill", last, whole[:, -1:], tolerance)
    check_untouched(judge, case.name, case.model)


def run_again(draw: Draw, judge: Judge) -> None:
    """The same calls give the same, bit for bit; tokens decoded and cropped leave no trace."""
    case = draw_case(draw, whole=False)
    ends = draw_calls(draw, 0, case.length)
    results = []
    for decoded in (draw.integer(0, 3) if can_crop(case.model) else 0, 0):
        cache, begin, logits = case.cache(), 0, []
        with enable(case.model, case.config):
            for end in ends:
                logits.append(case.model(case.ids[:, begin:end], past_key_values=cache).logits)
                for _ in range(decoded):
                    case.model(case.ids[:, :1], past_key_values=cache)
                if decoded:
                    cache.crop(-decoded)
                begin = end
        results.append((torch.cat(logits, 1), cache))
    (first, cache), (second, expected) = results
    judge.finite(f"{case.name}, {len(ends)} calls", first)
    judge.same(f"{case.name}, {len(ends)} calls again", first, second)
    same_cache(judge, f"{case.name}, {len(ends)} calls again", cache, expected)
    check_untouched(judge, case.name, case.model)


def run_generate(draw: Draw, judge: Judge) -> None:
    """Greedy tokens are the same again, and the stock model's if the memory holds everything."""
    whole = draw.chance(0.5)
    case = draw_case(draw, whole, torch.float64 if whole else None)
    new_tokens = draw.integer(1, 4)
    arguments: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "attention_mask": torch.ones_like(case.ids),
    }
    if whole:
        expected = case.model.generate(case.ids, **arguments)
    cached = draw.chance(0.7)
    if cached and draw.chance(0.4):
        arguments["prefill_chunk_size"] = case.config.chunk_size
    results = []
    with enable(case.model, case.config):
        for _ in range(2):
            if cached:
                arguments["past_key_values"] = case.cache()
            results.append(case.model.generate(case.ids, **arguments))
    if whole:
        judge.same(f"{case.name}, tokens of generate, whole memory", results[0], expected)
    judge.same(f"{case.name}, tokens of generate again", results[1], results[0])
    length = results[0].shape[1]
    judge.true(f"{case.name}, {length} tokens", length == case.length + new_tokens)
    check_untouched(judge, case.name, case.model)


def stock_logits(case: Case) -> Tensor:
    """Return the logits of the model as it is without us."""
    return case.model(case.ids).logits


def can_crop(model: Any) -> bool:
    """Return whether caches of a model can lose tokens: sliding layers have dropped old keys."""
    cache = DynamicCache(config=model.config)
    return not any(getattr(layer, "is_sliding", False) for layer in cache.layers)


def check_untouched(judge: Judge, name: str, model: Any) -> None:
    """Check that a model has no hook and the attention that it came with."""
    hooked = any(x._forward_pre_hooks or x._forward_hooks for x in model.modules())
    judge.true("a hook is left on the model", not hooked)
    implementation = model.config._attn_implementation
    expected = tiny_zoo.implementation(name)
    judge.true(f"{implementation} instead of {expected}", implementation == expected)


def same_memory(
    judge: Judge, what: str, cache: ChunkedPrefillCache, expected: ChunkedPrefillCache
) -> None:
    """Check that two caches selected the same."""
    for index, (ours, theirs) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        state, other = (getattr(x, "state", None) for x in (ours, theirs))
        judge.true(f"{what}: layer {index} has a state", (state is None) == (other is None))
        if state is not None and other is not None:
            judge.same(f"{what}: memory set of layer {index}", state.memory, other.memory)


def same_cache(judge: Judge, what: str, cache: Any, expected: Any) -> None:
    """Check that two caches hold the same, bit for bit."""
    judge.true(f"{what}: number of layers", len(cache.layers) == len(expected.layers))
    for index, (ours, theirs) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        where = f"{what}: layer {index}"
        length = theirs.get_seq_length()
        judge.true(f"{where}: length", ours.get_seq_length() == length)
        if length == 0:
            continue
        judge.same(f"{where}: keys", ours.keys, theirs.keys)
        judge.same(f"{where}: values", ours.values, theirs.values)
        state, other = (getattr(x, "state", None) for x in (ours, theirs))
        judge.true(f"{where}: has a state", (state is None) == (other is None))
        if state is not None and other is not None:
            judge.same(f"{where}: scores", state.scores, other.scores)
            judge.same(f"{where}: memory set", state.memory, other.memory)
            judge.true(f"{where}: last chunk", state.last_chunk_begin == other.last_chunk_begin)
    if isinstance(expected, ChunkedPrefillCache):
        judge.same(f"{what}: token ids", cache.token_ids, expected.token_ids)


def _toggle(draw: Draw, judge: Judge, case: Case, handle: Any) -> bool:
    """Another handle takes over and gives back; a model may be switched back for one call.

    Returns whether it still is enabled, so that the cache gets the ids of the call.
    """
    other = enable(case.model, "h2o")
    judge.true("the earlier handle is inactive", other.active and not handle.active)
    handle.enable()
    judge.true("the later handle is inactive", handle.active and not other.active)
    judge.refuses("an unknown preset", lambda: enable(case.model, "no-such-preset"))
    if draw.chance(0.5):
        handle.disable()
    return handle.active


def _copy(draw: Draw, cache: ChunkedPrefillCache) -> ChunkedPrefillCache:
    if draw.chance(0.5):
        return copy.deepcopy(cache)
    return pickle.loads(pickle.dumps(cache))


def _crop(draw: Draw, cache: ChunkedPrefillCache, logits: list[Tensor]) -> int:
    """Remove some of the last call's tokens from cache and logits; return how many."""
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        return 0
    removed = draw.integer(0, logits[-1].shape[1])
    if removed:
        cache.crop(-removed)
        logits[-1] = logits[-1][:, : logits[-1].shape[1] - removed]
    return removed
