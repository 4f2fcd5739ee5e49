"""`enable` on Hugging Face models: dense if the memory holds all, in calls, failing, generating."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compatibility.tiny_config import ORDINARY_IDS
from random_calls.draw import Draw, draw_calls, draw_settings
from random_calls.judge import FLOAT64_TOLERANCE, Judge
from soak import models
from torch import Tensor
from transformers import DynamicCache

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, chunked_prefill, enable

LONGEST = 512
# The operators have no kernels for float64 and run as ATen calls, slowly.
LONGEST_FLOAT64 = 192
# Prompts that presets prefill sparsely.
LONG_CHANCE = 0.04
# Results of a model that computes a part of it in float32.
MIXED_TOLERANCE = 1e-5


class Injected(RuntimeError):
    """An exception that no library raises by itself."""


@dataclass(frozen=True)
class Case:
    """A model, a prompt int64 [B, T], and settings."""

    name: str
    model: Any
    ids: Tensor
    config: PrefillConfig

    @property
    def length(self) -> int:
        return self.ids.shape[1]

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

    def check_untouched(self, judge: Judge) -> None:
        """Check that the model has no hook and the attention that it came with."""
        hooked = any(x._forward_pre_hooks or x._forward_hooks for x in self.model.modules())
        judge.true("a hook is left on the model", not hooked)
        implementation = self.model.config._attn_implementation
        expected = models.implementation(self.name)
        judge.true(f"{implementation} instead of {expected}", implementation == expected)


def draw_case(draw: Draw, whole: bool, dtype: torch.dtype | None = None) -> Case:
    """Draw a model, a prompt and settings."""
    name, dtype = draw.choice(models.FAMILIES), dtype or draw.choice(models.DTYPES)
    # Models come and go in a process too.
    model = (models.build if draw.chance(0.1) else models.shared)(name, dtype)
    longest = models.LONGEST if draw.chance(LONG_CHANCE) else LONGEST
    length = draw.size(2, LONGEST_FLOAT64 if dtype == torch.float64 else longest)
    ids = draw.ids(3 if draw.largest else draw.choice([1, 1, 1, 2, 3]), length, ORDINARY_IDS)
    return Case(name, model, ids, draw_settings(draw, length, 2, whole))


def run_disturbed(draw: Draw, judge: Judge) -> None:
    """The same calls give the same, bit for bit, whatever happens in and between them.

    With memory sets that hold everything a model gives what it gives without us.
    """
    whole = draw.chance(0.4)
    case = draw_case(draw, whole)
    stock, ends = case.model(case.ids).logits, draw_calls(draw, 0, case.length)
    new_cache = case.cache if draw.chance(0.8) else partial(DynamicCache, config=case.model.config)
    cache, expected, ids_known, logits = new_cache(), new_cache(), whole, []
    handle = enable(case.model, case.config)
    try:
        wanted = list(case.calls(ends, expected))
        for begin, end, same in zip([0, *ends], ends, wanted, strict=False):
            piece, what = case.ids[:, begin:end], f"{case.name}, [{begin}, {end}) again"
            if draw.chance(0.4):
                _fail(draw, judge, case, handle, piece, cache)
            if draw.chance(0.2):
                _switch(judge, case, handle)
            if draw.chance(0.2):
                copies = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
                cache = draw.choice(copies)(cache)
            if whole and draw.chance(0.2):
                handle.disable()
                ids_known = False
            logits.append(case.model(piece, past_key_values=cache).logits)
            judge.finite(what, logits[-1])
            if not whole:
                judge.same(what, logits[-1], same)
            handle.enable()
            removed = 0 if case.slides() else draw.integer(0, 2)
            for _ in range(removed):
                case.model(case.ids[:, :1], past_key_values=cache)
            if whole and removed and end - begin > 1:
                # Some of the call too, which is made again.
                again = draw.integer(1, end - begin - 1)
                cache.crop(-removed - again)
                logits.append(case.model(piece[:, -again:], past_key_values=cache).logits)
                logits[-2] = logits[-2][:, :-again]
            elif removed:
                cache.crop(-removed)
    finally:
        handle.disable()
    if not whole:
        _check_cache(judge, f"{case.name}, {len(ends)} calls again", cache, expected)
    else:
        truth = models.shared(case.name, torch.float64)(case.ids).logits
        what = f"{case.name}, whole memory"
        judge.close(what, torch.cat(logits, 1), truth, stock, of_model=True)
        if ids_known and isinstance(cache, ChunkedPrefillCache):
            judge.same(f"{what}: ids of the cache", cache.token_ids, case.ids)
    judge.same(f"{case.name}: without us again", case.model(case.ids).logits, stock)
    case.check_untouched(judge)


def run_calls(draw: Draw, judge: Judge) -> None:
    """In float64, where no two scores are nearly equal: calls, rows and helpers give the same."""
    case = draw_case(draw, whole=False, dtype=torch.float64)
    config = case.config.replace(dense_tail=0)
    # Calls that are too short to be sparse would make a difference, as those of one token are.
    least = max(2, config.sparse_from)
    ends = draw_calls(draw, 0, case.length, -(-least // config.chunk_size) * config.chunk_size)
    if len(ends) > 1 and ends[-1] - ends[-2] < least:
        del ends[-2]
    row = draw.integer(0, case.ids.shape[0] - 1)
    with enable(case.model, config):
        expected, cache = case.cache(), case.cache()
        whole = case.model(case.ids, past_key_values=expected).logits
        alone = case.model(case.ids[row : row + 1], past_key_values=case.cache()).logits
        results = {f"row {row} alone": (alone, whole[row : row + 1])}
        if not case.slides():
            results[f"calls to {ends}"] = torch.cat(list(case.calls(ends, cache)), 1), whole
            _check_cache(judge, f"{case.name}, calls", cache, expected, exact=False)
    if not case.slides():
        chunks = draw.integer(1, 5)
        prefilled = chunked_prefill(case.model, case.ids, config, chunks_per_call=chunks)
        results["chunked_prefill"] = prefilled.logits[:, -1:], whole[:, -1:]
    # Eager attention takes its softmax in float32.
    eager = models.implementation(case.name) == "eager"
    for what, (actual, wanted) in results.items():
        tolerance = MIXED_TOLERANCE if eager else FLOAT64_TOLERANCE
        judge.near(f"{case.name}, {what}", actual, wanted, tolerance)
    case.check_untouched(judge)


def run_generate(draw: Draw, judge: Judge) -> None:
    """Greedy tokens are the same again, and the stock model's if the memory holds everything."""
    whole = draw.chance(0.5)
    case = draw_case(draw, whole, torch.float64 if whole else None)
    new_tokens = draw.integer(1, 4)
    arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    arguments["attention_mask"] = torch.ones_like(case.ids)
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
    case.check_untouched(judge)


def _check_cache(judge: Judge, what: str, cache: Any, expected: Any, exact: bool = True) -> None:
    """Check that two caches hold the same, bit for bit, or only selected the same."""
    judge.true(f"{what}: number of layers", len(cache.layers) == len(expected.layers))
    for index, (ours, theirs) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        where, length = f"{what}: layer {index}", theirs.get_seq_length()
        judge.true(f"{where}: length", ours.get_seq_length() == length)
        if length == 0:
            continue
        state, other = (getattr(x, "state", None) for x in (ours, theirs))
        judge.true(f"{where}: has a state", (state is None) == (other is None))
        if state is not None and other is not None:
            judge.same(f"{where}: memory set", state.memory, other.memory)
            judge.same(f"{where}: errors", state.errors, other.errors)
            judge.true(f"{where}: last chunk", state.last_chunk_begin == other.last_chunk_begin)
        if exact:
            judge.same(f"{where}: scores", state and state.scores, other and other.scores)
            judge.same(f"{where}: keys", ours.keys, theirs.keys)
            judge.same(f"{where}: values", ours.values, theirs.values)
    if isinstance(expected, ChunkedPrefillCache):
        judge.same(f"{what}: token ids", cache.token_ids, expected.token_ids)


def _fail(draw: Draw, judge: Judge, case: Case, handle: Any, ids: Tensor, cache: Any) -> None:
    """Raise in the middle of a call: the cache is as it was."""
    before, called = copy.deepcopy(cache), []
    # The hooks of the model itself end the forward that may be undone.
    parts = [part for name, part in case.model.named_modules() if name]
    hooks = [part.register_forward_pre_hook(lambda x, _: called.append(x)) for part in parts]
    case.model(ids, past_key_values=copy.deepcopy(cache))
    for hook in hooks:
        hook.remove()
    kind = draw.choice([Injected, ValueError, KeyboardInterrupt])
    part, after = draw.choice(called), draw.chance(0.5)

    def fail(*_: Any) -> None:
        raise kind("injected")

    what = f"{case.name}, {kind.__name__} {'after' if after else 'before'} {type(part).__name__}"
    with part.register_forward_hook(fail) if after else part.register_forward_pre_hook(fail):
        judge.raises(kind, what, lambda: case.model(ids, past_key_values=cache))
    disabled = draw.chance(0.3)
    if disabled:
        handle.disable()
        judge.finite(f"{what}: without us", case.model(case.ids).logits)
    # torch calls no hook on an interrupt: what it left open ends with `disable` or the next
    # forward.
    if disabled or kind is not KeyboardInterrupt:
        _check_cache(judge, f"{what}: the cache", cache, before)
    handle.enable()


def _switch(judge: Judge, case: Case, handle: Any) -> None:
    """Another handle takes over, and gives back."""
    other = enable(case.model, "h2o")
    judge.true("the earlier handle is inactive", other.active and not handle.active)
    handle.enable()
    judge.true("the later handle is inactive", handle.active and not other.active)
    judge.raises(ValueError, "an unknown preset", lambda: enable(case.model, "no-such-preset"))
