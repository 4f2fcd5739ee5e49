"""ChunkedPrefillCache: calls that go on, and every operation that a cache must survive."""

import copy
import pickle
import warnings

import pytest
import torch
from hf_helpers import (
    RECALL,
    SPARSE,
    assert_close,
    failing,
    in_calls,
    new_cache,
)
from op_testing import saved_and_loaded
from transformers import DynamicCache, StaticCache

from h2o_prefill import ChunkedPrefillCache, enable

SPARSE = {**SPARSE, "min_prefill": 2}
RECALL = {**RECALL, "min_prefill": 2}


def test_decoding_leaves_the_state_alone_and_a_later_call_takes_the_tokens_in(llama, make_ids):
    ids = make_ids(1, 80)
    with enable(llama, **SPARSE):
        cache = new_cache(llama)
        in_calls(llama, cache, ids[:, :35], (32, 1, 1, 1))
        state = cache.layers[0].state
        assert state.scored == 32 and state.scores.shape[-1] == 32
        llama(ids[:, 35:], past_key_values=cache)
        assert cache.layers[0].state.scored == 80
        assert cache.layers[0].state.last_chunk_begin == 35 + 32
        # The local window belongs to the new call: its first chunk sees the decoded tokens.
        cache.crop(-(80 - 51))
        short = new_cache(llama)
        in_calls(llama, short, ids[:, :51], (32, 1, 1, 1, 16))
        for memory in short.layers[0].state.memory[0]:
            assert {31, 32, 33, 34} <= set(memory.tolist())


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": lambda cache: saved_and_loaded(cache, weights_only=False),
}


@pytest.mark.parametrize("how", list(COPIES))
def test_copies_go_on_independently(llama, ids, how):
    """The prefix-caching recipe: one prefix, copied, with two continuations."""
    other = ids.clone()
    other[:, 32:] = other[:, 32:].flip(1)
    with enable(llama, **RECALL):
        prefix = new_cache(llama)
        llama(ids[:, :32], past_key_values=prefix)
        for prompt in (ids, other):
            cache = COPIES[how](prefix)
            ours = llama(prompt[:, 32:], past_key_values=cache).logits
            whole = llama(prompt).logits[:, 32:]
            assert_close(ours, whole)
        assert prefix.get_seq_length() == 32 and prefix.layers[0].state.scored == 32


@pytest.mark.parametrize("how", ["reset", "crop"])
def test_an_emptied_cache_is_as_a_new_one(llama, ids, how):
    with enable(llama, **RECALL):
        cache = new_cache(llama)
        first = llama(ids, past_key_values=cache).logits
        cache.reset() if how == "reset" else cache.crop(-72)
        assert cache.get_seq_length() == 0 and cache.token_ids is None
        assert not any(layer.state.scored for layer in cache.layers)
        assert torch.equal(llama(ids, past_key_values=cache).logits, first)


@pytest.mark.parametrize("kept", [71, 65, 64, 50, 16, 3])
def test_crop_below_the_state_leaves_nothing_that_was_removed(llama, ids, kept):
    with enable(llama, **RECALL, error_rows=4):
        cache = new_cache(llama)
        llama(ids, past_key_values=cache)
        before = [layer.state.clone() for layer in cache.layers]
        cache.crop(kept - 72)
        assert cache.get_seq_length() == kept == cache.token_ids.shape[1]
        for layer, old in zip(cache.layers, before, strict=True):
            state, within_the_last_chunk = layer.state, kept > 64
            assert state.scored == kept and torch.equal(state.scores, old.scores[..., :kept])
            assert state.last_chunk_begin == (64 if within_the_last_chunk else 0)
            memory = old.memory if within_the_last_chunk else torch.full_like(old.memory, -1)
            assert torch.equal(state.memory, memory) and torch.equal(state.errors, old.errors)
        assert llama(ids[:, kept:], past_key_values=cache).logits.isfinite().all()
        assert cache.layers[0].state.scored == (72 if kept < 71 else 71)


def test_rows_can_be_repeated_selected_and_reordered(llama, make_ids):
    rows = make_ids(2, 72)
    with enable(llama, **RECALL):
        whole = llama(rows).logits[:, 32:]
        cache = new_cache(llama)
        llama(rows[:, :32], past_key_values=cache)
        cache.batch_repeat_interleave(2)  # rows 0 0 1 1
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))  # rows 1 0 0 1
        cache.batch_select_indices(torch.tensor([0, 2, 3]))  # rows 1 0 1
        order = torch.tensor([1, 0, 1])
        ours = llama(rows[order, 32:], past_key_values=cache).logits
    assert_close(ours, whole[order])
    assert torch.equal(cache.token_ids, rows[order])


def test_offload_and_prefetch_keep_the_state(llama, ids):
    with enable(llama, **SPARSE):
        cache = new_cache(llama)
        llama(ids[:, :32], past_key_values=cache)
        for layer in cache.layers:
            layer.offload()
            assert layer.state.scores.device.type == "cpu"
            layer.prefetch()
        ours = llama(ids[:, 32:], past_key_values=cache).logits
        assert_close(ours, llama(ids).logits[:, 32:])


def test_a_cache_used_without_us_is_a_plain_cache(llama, ids):
    ours = in_calls(llama, new_cache(llama), ids, (30, 1, 41))
    assert torch.equal(ours, in_calls(llama, DynamicCache(config=llama.config), ids, (30, 1, 41)))


def test_a_cache_is_refused_after_an_interrupt_until_it_is_reset(llama, ids):
    with enable(llama, **SPARSE) as handle:
        cache, fresh = (new_cache(llama) for _ in range(2))
        expected = llama(ids, past_key_values=cache).logits
        with failing(llama.model.layers[1].mlp, KeyboardInterrupt):
            llama(ids[:, 32:], past_key_values=cache)
        with pytest.raises(RuntimeError, match="half updated"):
            llama(ids[:, 32:], past_key_values=cache)
        cache.reset()
        assert torch.equal(llama(ids, past_key_values=cache).logits, expected)
        with failing(llama.model.embed_tokens):
            llama(ids, past_key_values=fresh)
        assert torch.equal(llama(ids, past_key_values=fresh).logits, expected)
        handle.disable()


def test_a_static_cache_is_refused_after_a_failed_forward_until_it_is_reset(llama, ids):
    cache = StaticCache(config=llama.config, max_cache_len=96)
    with enable(llama, **SPARSE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="h2o_prefill: .*static caches")
        llama(ids[:, :40], past_key_values=cache)
        with failing(llama.model.layers[1].mlp):
            llama(ids[:, 40:], past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"half updated; reset\(\) it"):
            llama(ids[:, 40:], past_key_values=cache)
        cache.reset()
        assert_close(llama(ids, past_key_values=cache).logits, llama(ids).logits)


def test_a_failed_cache_goes_on_from_a_checkpoint(llama, make_ids):
    """Layers of a failed cache hold different numbers of tokens."""
    ids = make_ids(1, 96)
    with enable(llama, **RECALL):
        failed, other = (
            ChunkedPrefillCache(config=llama.config, checkpoints=True) for _ in range(2)
        )
        for cache, length in ((failed, 96), (other, 32)):
            llama(ids[:, :length], past_key_values=cache)
        failed.failed = True
        failed.layers[1].crop(-40)
        with pytest.raises(RuntimeError, match="half updated"):
            llama(ids[:, :16], past_key_values=failed)
        assert failed.checkpoint_before(80) == 48
        failed.crop(60 - 96)  # no checkpoint
        with pytest.raises(RuntimeError, match="half updated"):
            llama(ids[:, :16], past_key_values=failed)
        failed.crop(32 - failed.get_seq_length())
        logits = [llama(ids[:, 32:], past_key_values=cache).logits for cache in (failed, other)]
        assert torch.equal(*logits) and failed.token_ids.equal(ids)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_a_cache_of_inference_mode_goes_on_outside_of_it(llama, make_ids, own, backend):
    ids = make_ids(1, 120)

    def logits(first):
        cache = new_cache(llama) if own else None
        with first():
            cache = llama(ids[:, :48], past_key_values=cache, use_cache=True).past_key_values
        with torch.no_grad():
            model = llama if backend is None else torch.compile(llama, backend=backend)
            later = in_calls(model, cache, ids[:, 48:100], (1, 51))
            cache.crop(-40)
            return torch.cat([later, llama(ids[:, 60:], past_key_values=cache).logits], dim=1)

    with enable(llama, **SPARSE):
        assert_close(logits(torch.inference_mode), logits(torch.no_grad))
