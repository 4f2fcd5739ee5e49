"""ChunkedPrefillCache: calls that go on, and every operation that a cache must survive."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from transformers import StaticCache

from h2o_prefill import ChunkedPrefillCache, enable
from h2o_prefill.state import PrefillState

SPARSE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4, "min_prefill": 2}
RECALL = {**SPARSE, "recall": 2, "recall_block": 8}


def calls(model, cache, ids, *lengths):
    """Feed `ids` in pieces and return all logits."""
    pieces = ids.split(list(lengths), dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def same_state(a, b):
    """Return whether two states are equal, memory sets exactly."""
    torch.testing.assert_close(a.scores, b.scores, atol=1e-5, rtol=1e-5)
    return (
        torch.equal(a.memory, b.memory)
        and (a.length, a.last_chunk_begin) == (b.length, b.last_chunk_begin)
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(16, 56), (32, 16, 24), (16, 16, 16, 16, 8), (64, 8)])
@pytest.mark.parametrize("options", [SPARSE, RECALL, {**SPARSE, "sink_tokens": 2}])
def test_calls_in_multiples_of_the_chunk_equal_one_call(llama, ids, lengths, options):
    with enable(llama, **options):
        whole_cache = ChunkedPrefillCache(config=llama.config)
        whole = llama(ids, past_key_values=whole_cache).logits
        torch.testing.assert_close(whole, llama(ids).logits, atol=1e-6, rtol=1e-6)
        cache = ChunkedPrefillCache(config=llama.config)
        torch.testing.assert_close(calls(llama, cache, ids, *lengths), whole, atol=1e-5, rtol=1e-5)
    for ours, expected in zip(cache.layers, whole_cache.layers, strict=True):
        assert same_state(ours.state, expected.state)
    assert torch.equal(cache.token_ids, ids)


def test_a_cache_without_config_works_too(llama, ids):
    with enable(llama, **SPARSE):
        cache = ChunkedPrefillCache()
        torch.testing.assert_close(
            calls(llama, cache, ids, 32, 40), llama(ids).logits, atol=1e-5, rtol=1e-5
        )


def test_decoding_leaves_the_state_alone_and_a_later_call_takes_the_tokens_in(llama, make_ids):
    ids = make_ids(1, 80)
    with enable(llama, **SPARSE):
        cache = ChunkedPrefillCache(config=llama.config)
        calls(llama, cache, ids[:, :35], 32, 1, 1, 1)
        state = cache.layers[0].state
        assert state.length == 32 and state.scores.shape[-1] == 32
        llama(ids[:, 35:], past_key_values=cache)
        assert cache.layers[0].state.length == 80
        assert cache.layers[0].state.last_chunk_begin == 35 + 32
        # The local window is that of the new call: its first chunk sees the decoded tokens.
        cache.crop(-(80 - 51))
        short = ChunkedPrefillCache(config=llama.config)
        calls(llama, short, ids[:, :51], 32, 1, 1, 1, 16)
        for memory in short.layers[0].state.memory[0]:
            assert {31, 32, 33, 34} <= set(memory.tolist())


def test_history_that_came_densely_is_a_candidate(llama, make_ids, sparse_layers):
    ids = make_ids(1, 52)
    big = {"chunk_size": 16, "local_window": 64, "heavy_budget": 64}
    stock = llama(ids).logits
    with enable(llama, **big):
        cache = ChunkedPrefillCache(config=llama.config)
        ours = calls(llama, cache, ids, 9, 43)
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == [43, 43]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": lambda cache: _through_torch_save(cache),
}


def _through_torch_save(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", list(COPIES))
def test_copies_go_on_independently(llama, ids, how):
    """The prefix-caching recipe: one prefix, copied, with two continuations."""
    other = ids.clone()
    other[:, 32:] = other[:, 32:].flip(1)
    with enable(llama, **RECALL):
        prefix = ChunkedPrefillCache(config=llama.config)
        llama(ids[:, :32], past_key_values=prefix)
        for prompt in (ids, other):
            cache = COPIES[how](prefix)
            ours = llama(prompt[:, 32:], past_key_values=cache).logits
            whole = llama(prompt).logits[:, 32:]
            torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-5)
        assert prefix.get_seq_length() == 32 and prefix.layers[0].state.length == 32


def test_reset(llama, ids):
    with enable(llama, **RECALL):
        cache = ChunkedPrefillCache(config=llama.config)
        first = llama(ids, past_key_values=cache).logits
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.token_ids is None
        assert all(layer.state is None for layer in cache.layers)
        assert torch.equal(llama(ids, past_key_values=cache).logits, first)


def test_crop_of_decoded_tokens_leaves_no_trace(llama, ids):
    with enable(llama, **RECALL):
        cache, other = (ChunkedPrefillCache(config=llama.config) for _ in range(2))
        calls(llama, cache, ids[:, :38], 32, 1, 1, 1, 1, 1, 1)
        cache.crop(-6)
        llama(ids[:, :32], past_key_values=other)
        assert same_state(cache.layers[1].state, other.layers[1].state)
        ours = llama(ids[:, 32:], past_key_values=cache).logits
        assert torch.equal(ours, llama(ids[:, 32:], past_key_values=other).logits)


@pytest.mark.parametrize("kept", [71, 65, 64, 50, 16, 3])
def test_crop_below_the_state_leaves_nothing_that_was_removed(llama, ids, kept):
    with enable(llama, **RECALL):
        cache = ChunkedPrefillCache(config=llama.config)
        llama(ids, past_key_values=cache)
        cache.crop(kept - 72)
        assert cache.get_seq_length() == kept == cache.token_ids.shape[1]
        for layer in cache.layers:
            state = layer.state
            assert state.length == kept == state.scores.shape[-1]
            assert state.last_chunk_begin <= kept and int(state.memory.max()) < kept
        assert (cache.layers[0].state.last_chunk_begin == 64) == (kept > 64)
        assert llama(ids[:, kept:], past_key_values=cache).logits.isfinite().all()
        assert cache.layers[0].state.length == (72 if kept < 71 else 71)


def test_crop_to_nothing_equals_a_new_cache(llama, ids):
    with enable(llama, **RECALL):
        cache = ChunkedPrefillCache(config=llama.config)
        first = llama(ids, past_key_values=cache).logits
        cache.crop(-72)
        assert cache.layers[0].state is None
        assert torch.equal(llama(ids, past_key_values=cache).logits, first)


def test_truncating_a_state_leaves_it_alone():
    state = PrefillState(torch.rand(1, 2, 40), torch.arange(6).int().expand(1, 2, 6), 40, 32)
    assert state.truncated(40) is state
    assert state.truncated(0) is None
    inside, before = state.truncated(33), state.truncated(32)
    assert torch.equal(inside.memory, state.memory) and inside.last_chunk_begin == 32
    assert bool((before.memory == -1).all()) and before.last_chunk_begin == 0
    assert torch.equal(before.scores, state.scores[..., :32]) and state.length == 40


def test_rows_can_be_repeated_selected_and_reordered(llama, make_ids):
    rows = make_ids(2, 72)
    with enable(llama, **RECALL):
        whole = llama(rows).logits[:, 32:]
        cache = ChunkedPrefillCache(config=llama.config)
        llama(rows[:, :32], past_key_values=cache)
        cache.batch_repeat_interleave(2)  # rows 0 0 1 1
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))  # rows 1 0 0 1
        cache.batch_select_indices(torch.tensor([0, 2, 3]))  # rows 1 0 1
        order = torch.tensor([1, 0, 1])
        ours = llama(rows[order, 32:], past_key_values=cache).logits
    torch.testing.assert_close(ours, whole[order], atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.token_ids, rows[order])


def test_offload_and_prefetch_keep_the_state(llama, ids):
    with enable(llama, **SPARSE):
        cache = ChunkedPrefillCache(config=llama.config)
        llama(ids[:, :32], past_key_values=cache)
        for layer in cache.layers:
            layer.offload()
            assert layer.state.scores.device.type == "cpu"
            layer.prefetch()
        ours = llama(ids[:, 32:], past_key_values=cache).logits
        torch.testing.assert_close(ours, llama(ids).logits[:, 32:], atol=1e-5, rtol=1e-5)


def test_a_cache_used_without_us_is_a_plain_cache(llama, ids):
    from transformers import DynamicCache

    ours = calls(llama, ChunkedPrefillCache(config=llama.config), ids, 30, 1, 41)
    assert torch.equal(ours, calls(llama, DynamicCache(config=llama.config), ids, 30, 1, 41))


def test_a_call_after_an_interrupt_goes_on_as_if_that_had_not_been(llama, ids):
    def interrupt(*_):
        raise KeyboardInterrupt

    with enable(llama, **SPARSE):
        caches = [ChunkedPrefillCache(config=llama.config) for _ in range(2)]
        for cache in caches:
            llama(ids[:, :32], past_key_values=cache)
        expected = llama(ids[:, 32:], past_key_values=caches[0]).logits
        hook = llama.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llama(ids[:, 32:], past_key_values=caches[1])
        hook.remove()
        again = llama(ids[:, 32:], past_key_values=caches[1]).logits
    torch.testing.assert_close(again, expected, atol=0, rtol=0)


def test_a_model_may_be_called_inside_of_its_own_hook(llama, ids):
    nested = []

    def call(*_):
        if not nested:
            nested.append(None)
            nested.append(llama(ids[:, :40]).logits)

    with enable(llama, **SPARSE):
        expected, short = llama(ids).logits, llama(ids[:, :40]).logits
        cache = ChunkedPrefillCache(config=llama.config)
        hook = llama.model.layers[0].register_forward_hook(call)
        ours = llama(ids, past_key_values=cache).logits
        hook.remove()
    assert torch.equal(ours, expected) and torch.equal(nested[1], short)
    assert cache.get_seq_length() == 72


def test_a_static_cache_is_refused_after_a_failed_forward_until_it_is_reset(llama, ids):
    def fail(*_):
        raise KeyError("user code")

    cache = StaticCache(config=llama.config, max_cache_len=96)
    with enable(llama, **SPARSE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="h2o_prefill: .*static caches")
        llama(ids[:, :40], past_key_values=cache)
        hook = llama.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            llama(ids[:, 40:], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match=r"half updated; reset\(\) the cache"):
            llama(ids[:, 40:], past_key_values=cache)
        cache.reset()
        ours = llama(ids, past_key_values=cache).logits
        torch.testing.assert_close(ours, llama(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_cache_of_inference_mode_goes_on_outside_of_it(llama, make_ids, own, backend):
    ids = make_ids(1, 120)

    def logits(first):
        cache = ChunkedPrefillCache(config=llama.config) if own else None
        with first():
            cache = llama(ids[:, :48], past_key_values=cache, use_cache=True).past_key_values
        with torch.no_grad():
            model = llama if backend is None else torch.compile(llama, backend=backend)
            later = calls(model, cache, ids[:, 48:100], 1, 51)
            cache.crop(-40)
            return torch.cat([later, llama(ids[:, 60:], past_key_values=cache).logits], dim=1)

    with enable(llama, **SPARSE):
        torch.testing.assert_close(
            logits(torch.inference_mode), logits(torch.no_grad), atol=1e-5, rtol=1e-5
        )
