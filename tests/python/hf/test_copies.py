"""Copies of a cache share the rows before them, and nothing after them."""

import copy
import gc
import pickle
import threading

import pytest
import torch
import transformers
from hf_helpers import EVERYTHING, H2O, RECALL, in_calls, new_cache

from h2o_prefill import ChunkedPrefillCache, enable
from h2o_prefill.hf.cache import leave_shared


def keys_at(cache):
    return [layer.keys.data_ptr() for layer in cache.layers]


@pytest.fixture
def prompt(llama, ids):
    """A cache of 72 tokens of an enabled model."""
    with enable(llama, **RECALL):
        cache = new_cache(llama)
        llama(ids, past_key_values=cache)
        yield cache


@pytest.fixture
def ask(llama, ids):
    """Return a function that goes on from a cache by a number of tokens that begin with `first`."""

    def ask(cache, first, tokens=20):
        piece = ids[:, :tokens].clone()
        piece[:, 0] = first
        return llama(piece, past_key_values=cache).logits

    return ask


def expected(prompt, ask, *firsts):
    return [ask(copy.deepcopy(prompt), first) for first in firsts]


def test_questions_one_after_the_other_copy_no_keys(prompt, ask):
    answers = expected(prompt, ask, 5, 6, 7)
    prompt.copy()  # makes room
    state = prompt.layers[0].state.clone()
    for first, answer in zip((5, 6, 7), answers, strict=True):
        branch = prompt.copy()
        assert torch.equal(ask(branch, first), answer)
        assert keys_at(branch) == keys_at(prompt) and branch.get_seq_length() == 92
        del branch
        gc.collect()
    assert prompt.get_seq_length() == 72 == prompt.token_ids.shape[1]
    assert torch.equal(prompt.layers[0].state.scores, state.scores)
    # The prompt itself goes on after its copies.
    assert torch.equal(ask(prompt, 6), answers[1])


def test_questions_at_once_move_apart(prompt, ask):
    answers = expected(prompt, ask, 5, 6, 7)
    branches = [prompt.copy(), prompt.copy(), prompt]
    assert len({tuple(keys_at(branch)) for branch in branches}) == 1
    outputs = [ask(x, first) for x, first in zip(branches, (5, 6, 7), strict=True)]
    assert all(map(torch.equal, outputs, answers))
    assert len({tuple(keys_at(branch)) for branch in branches}) == 3
    whole = [ask(copy.deepcopy(x), 9) for x in branches]
    assert all(map(torch.equal, whole, [ask(x.copy(), 9) for x in branches]))


def test_copies_of_copies_and_crops_leave_the_others_alone(prompt, ask):
    first = prompt.copy()
    ask(first, 5)
    second = first.copy()
    before, whole = second.layers[1].keys.clone(), copy.deepcopy(second)
    for cache, removed in ((first, 20), (prompt, 30)):
        cache.crop(-removed)
        ask(cache, 8)
        assert torch.equal(second.layers[1].keys, before)
    del first
    gc.collect()
    assert torch.equal(ask(prompt.copy(), 9), ask(prompt, 9))
    assert torch.equal(ask(second, 6), ask(whole, 6))


def test_threads_that_ask_at_once(llama, prompt, ask, spawn):
    firsts = range(5, 13)
    answers = expected(prompt, ask, *firsts)
    outputs, ready = [None] * len(firsts), threading.Barrier(len(firsts))

    def work(number):
        ready.wait()
        branch = prompt.copy()
        ready.wait()
        outputs[number] = ask(branch, firsts[number])

    threads = [spawn(lambda number=number: work(number)) for number in range(len(firsts))]
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, outputs, answers))


@pytest.mark.parametrize(("name", "how"), [("llama", EVERYTHING), ("gemma2", H2O)])
def test_copies_of_other_layers_and_of_loaded_sessions(build, ids, tmp_path, name, how):
    model = build(name)
    with enable(model, **how):
        cache = new_cache(model)
        in_calls(model, cache, ids, (48, 1, 23))
        cache.save(tmp_path / "file")
        loaded = ChunkedPrefillCache.load(tmp_path / "file", model)
        whole = [copy.deepcopy(cache) for _ in range(2)]
        pieces = [ids[:, :18], ids[:, 3:21]]
        answers = [model(x, past_key_values=y).logits for x, y in zip(pieces, whole, strict=True)]
        for source in (cache, loaded):
            branches = [source.copy(room=4), source.copy(room=400)]
            for branch, piece, answer in zip(branches, pieces, answers, strict=True):
                assert torch.equal(model(piece, past_key_values=branch).logits, answer)


def test_copies_without_tokens(llama, prompt, ids):
    for empty in (new_cache(llama), prompt):
        empty.crop(-empty.get_seq_length())
        one, other = empty.copy(), empty.copy()
        logits = [llama(x, past_key_values=y).logits for x, y in ((ids, one), (ids.flip(1), other))]
        fresh = [llama(x).logits for x in (ids, ids.flip(1))]
        assert all(map(torch.equal, logits, fresh))
        assert one.token_ids.equal(ids) and other.token_ids.equal(ids.flip(1))
    with pytest.raises(ValueError, match="room must be >= 0, got -1"):
        empty.copy(room=-1)


def test_a_compiled_model_shares_nothing(prompt, ask):
    (answer,) = expected(prompt, ask, 5)
    branch = prompt.copy()
    leave_shared(branch)
    assert not set(keys_at(branch)) & set(keys_at(prompt))
    assert torch.equal(ask(branch, 5), answer)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_cache_that_was_adopted(llama, ids, copy_of):
    """Copies of a user's cache go on by themselves; what edits it edits the ids that it holds."""
    with enable(llama, **RECALL):
        cache = transformers.DynamicCache(config=llama.config)
        llama(ids[:, :64], past_key_values=cache)
        other = copy_of(cache)
        expected = llama(ids[:, 64:], past_key_values=cache).logits
        assert cache.get_seq_length() == ids.shape[1] and other.get_seq_length() == 64
        result = llama(ids[:, 64:], past_key_values=other)
        assert torch.equal(result.logits, expected)
        other.crop(-30)
        again = llama(ids[:, -30:], past_key_values=other)
        assert torch.equal(again.past_key_values.token_ids, ids)
        assert type(other) is ChunkedPrefillCache
