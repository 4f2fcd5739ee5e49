"""A prompt goes on to the bit: from copies, files, checkpoints, after a reset or a failure."""

import copy
import pickle
import warnings

import pytest
import torch
from hf_helpers import (
    EVERYTHING,
    H2O,
    PRESET_EXACT,
    RECALL,
    RECOMMENDED,
    SPARSE,
    WIDENING,
    assert_same_states,
    failing,
    in_calls,
    new_cache,
)
from op_testing import saved_and_loaded
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from h2o_prefill import ChunkedPrefillCache, enable

RECURRENT = ("FalconH1ForCausalLM", "ZayaForCausalLM", "Zamba2ForCausalLM")


class Prompt:
    """Two rows of a model, whose cache is filled in calls: sparse, decoded, short."""

    calls, rest = (64, 1, 1, 6), (64, 13, 1)

    def __init__(self, model, ids, path):
        self.model, self.path = model, path
        self.ids, self.more = torch.cat([ids, ids.flip(1)]).split((72, 78), dim=1)

    def fill(self, cache=None):
        cache = cache or new_cache(self.model)
        in_calls(self.model, cache, self.ids, self.calls)
        return cache

    def go_on(self, cache):
        return in_calls(self.model, cache, self.more, self.rest)


def in_inference_mode(prompt):
    with torch.inference_mode():
        return prompt.fill()


def saved(prompt):
    prompt.fill().save(prompt.path, prompt.model)
    cache = ChunkedPrefillCache.load(prompt.path, prompt.model)
    cache.save(prompt.path, prompt.model)  # although the first file is mapped
    return ChunkedPrefillCache.load(prompt.path, prompt.model)


def emptied(prompt):
    cache = prompt.fill()
    prompt.go_on(cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.token_ids is None
    return prompt.fill(cache)


def reordered(prompt):
    cache = prompt.fill()
    cache.batch_repeat_interleave(2)  # rows 0 0 1 1
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))  # rows 1 0 0 1
    cache.batch_select_indices(torch.tensor([1, 0]))
    return cache


def back_at_a_checkpoint(prompt):
    cache = prompt.fill(new_cache(prompt.model, checkpoints=True))
    prompt.go_on(cache)
    assert [cache.checkpoint_before(n) for n in (15, 47, 71)] == [0, 32, 64]
    cache.crop(64 - cache.get_seq_length())
    in_calls(prompt.model, cache, prompt.ids[:, 64:], prompt.calls[1:])
    return cache


def offloaded(prompt):
    cache = prompt.fill()
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    return cache


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": lambda cache: saved_and_loaded(cache, weights_only=False),
}
WAYS_BACK = {
    **{name: lambda prompt, how=how: how(prompt.fill()) for name, how in COPIES.items()},
    "a session file": saved,
    "reset": emptied,
    "rows": reordered,
    "offload": offloaded,
    "inference mode": in_inference_mode,
}
WIDENED = {**RECOMMENDED, "sink_tokens": 2, **WIDENING}
# Family, dtype and settings.
GO_ON = {
    "all": ("llama", "float32", EVERYTHING),
    "widened": ("llama", "float32", WIDENED),
    "exact": ("llama", "float32", PRESET_EXACT),
    "bfloat16": ("qwen3", "bfloat16", WIDENED),
    "latent": ("deepseek-v3", "float32", RECALL),
    "a window": ("gemma2", "float32", H2O),
    "windows": ("mistral-window", "float32", H2O),
    **{x: (x, "float32", SPARSE) for x in RECURRENT},  # by copies, and reset
}


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *((x, WAYS_BACK[way]) for x in GO_ON if x not in RECURRENT for way in WAYS_BACK),
        *((x, WAYS_BACK[way]) for x in RECURRENT for way in (*COPIES, "reset")),
        *((x, back_at_a_checkpoint) for x in ("widened", "bfloat16", "latent")),
    ],
)
def test_a_prompt_goes_on_to_the_bit(build, prompt, tmp_path, case, way):
    warnings.filterwarnings("ignore", message="h2o_prefill: .* has a sliding window")
    family, dtype, settings = GO_ON[case]
    model = build(family).to(getattr(torch, dtype))
    with enable(model, **settings):
        prompt = Prompt(model, prompt, tmp_path / "prompt.session")
        plain, cache = prompt.fill(), way(prompt)
        assert torch.equal(prompt.go_on(cache), prompt.go_on(plain))
        if way is not back_at_a_checkpoint:  # which has the scores of its memory set alone
            assert_same_states(cache, plain, 0)
    assert torch.equal(cache.token_ids, torch.cat([prompt.ids, prompt.more], dim=1))


def test_a_cache_used_without_us_is_a_plain_cache(llama, ids):
    ours = in_calls(llama, new_cache(llama), ids, (30, 1, 41))
    assert torch.equal(ours, in_calls(llama, DynamicCache(config=llama.config), ids, (30, 1, 41)))


EMPTY = {
    "ours": new_cache,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "without config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=90),
}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in EMPTY), ("FalconH1ForCausalLM", "ours")],
)
def test_a_cache_whose_forward_failed_is_refused_until_it_is_reset(build, ids, family, kind, error):
    model = build(family)
    cache = EMPTY[kind](model)
    with enable(model, **SPARSE):
        alone, whole = model(ids).logits, in_calls(model, cache, ids, (40, 32))
        cache.reset()
        model(ids[:, :40], past_key_values=cache)
        with failing(model.model.layers[0], error):
            model(ids[:, 40:], past_key_values=cache)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"half updated; reset\(\) it[^\n]*$"):
                model(ids[:, 40:], past_key_values=cache)
        assert torch.equal(model(ids).logits, alone)
        cache.reset()
        assert torch.equal(in_calls(model, cache, ids, (40, 32)), whole)


crops = pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="transformers is too old")


@pytest.mark.parametrize(
    "empty", [lambda cache: cache.reset(), pytest.param(lambda cache: cache.crop(-72), marks=crops)]
)
def test_an_emptied_static_cache_has_no_trace_of_the_prompt_before(llama, ids, make_ids, empty):
    new, used = (StaticCache(config=llama.config, max_cache_len=90) for _ in range(2))
    with enable(llama, **RECALL):
        llama(make_ids(1, 72, seed=4), past_key_values=used)
        empty(used)
        # The first call is too short to be sparse, and leaves the state as it was.
        ours, expected = (in_calls(llama, cache, ids, (8, 64)) for cache in (used, new))
        assert torch.equal(ours, expected)
        assert_same_states(used, new, 0)


def test_a_failed_cache_goes_on_from_a_checkpoint(llama, make_ids):
    ids = make_ids(1, 112)
    with enable(llama, **RECALL):
        failed, other = (new_cache(llama, checkpoints=True) for _ in range(2))
        llama(ids[:, :96], past_key_values=failed)
        llama(ids[:, :32], past_key_values=other)
        with failing(llama.model.layers[0]):
            llama(ids[:, 96:], past_key_values=failed)
        assert failed.checkpoint_before(80) == 80
        for length in (60, 32):
            with pytest.raises(RuntimeError, match="half updated"):
                llama(ids[:, :16], past_key_values=failed)
            failed.crop(length - failed.get_seq_length())
        ours, expected = (llama(ids[:, 32:], past_key_values=x).logits for x in (failed, other))
    assert torch.equal(ours, expected) and torch.equal(failed.token_ids, ids)


def test_a_forward_that_fails_before_it_changes_the_cache_leaves_it(llama, ids):
    with enable(llama, **SPARSE):
        cache, other = new_cache(llama), new_cache(llama)
        expected = llama(ids, past_key_values=other).logits
        with failing(llama.model.embed_tokens):
            llama(ids, past_key_values=cache)
        assert torch.equal(llama(ids, past_key_values=cache).logits, expected)
