"""Prompts that are dense because sparse attention would be slower: `min_prefill="auto"`."""

import pytest
import torch
from hf_helpers import GREEDY, SPARSE, assert_close, in_calls, new_cache

from h2o_prefill import ChunkedPrefillCache, PrefixCache, chunked_prefill, enable, explain

AUTO = {**SPARSE, "config": "h2o", "min_prefill": "auto"}


@pytest.fixture
def enabled(llama):
    with enable(llama, **AUTO) as handle:
        yield handle


@pytest.fixture
def shortest(enabled, llama):
    """Return the tokens of the shortest sparse prompt."""
    shortest = enabled.state.shortest_sparse_prompt(llama)
    assert 16 < shortest < 32
    return shortest


def is_sparse(cache):
    return cache.layers[1].state.scored > 0


def test_a_prompt_is_sparse_from_the_length_that_the_report_names(llama, ids, shortest):
    for length in (1, 16, shortest - 1, shortest, 72):
        cache = llama(ids[:, :length]).past_key_values
        assert is_sparse(cache) == (length >= shortest)
    report = explain(llama)
    assert report.shortest_sparse_prompt == shortest
    assert f"prompts of fewer than {shortest} tokens are dense" in str(report)


def test_calls_of_a_known_prompt_equal_one_call(llama, ids, enabled, sparse_layers):
    ids = ids[:, :64]
    whole = llama(ids).past_key_values
    cache = chunked_prefill(llama, ids, chunks_per_call=1).past_key_values
    text = llama.generate(ids, **GREEDY)
    for ours, expected in zip(cache.layers, whole.layers, strict=True):
        assert_close(ours.state.scores, expected.state.scores)
        assert torch.equal(ours.state.memory, expected.state.memory)
    sparse_layers.clear()
    assert torch.equal(llama.generate(ids, prefill_chunk_size=16, **GREEDY), text)
    assert sparse_layers[:2] == [16, 16]


def test_a_prompt_of_unknown_length_is_dense_until_it_is_long_enough(llama, ids, shortest):
    stock = new_cache(llama)
    cache = new_cache(llama)
    assert not is_sparse(llama(ids[:, :16], past_key_values=cache).past_key_values)
    assert cache.min_prefill == shortest
    llama(ids[:, 16:32], past_key_values=cache)
    assert is_sparse(cache)
    llama(ids[:, 32:48], past_key_values=cache)  # and stays sparse
    assert cache.layers[1].state.scored == 48
    in_calls(llama, stock, ids[:, :15], (10, 5))
    assert not is_sparse(stock)


def test_sessions_go_on_as_they_are(llama, ids, enabled, tmp_path):
    cache = new_cache(llama)
    llama(ids[:, :48], past_key_values=cache)
    cache.save(tmp_path / "prompt.session", llama)
    loaded = ChunkedPrefillCache.load(tmp_path / "prompt.session", llama)
    expected = llama(ids[:, 48:64], past_key_values=cache).logits
    assert torch.equal(llama(ids[:, 48:64], past_key_values=loaded).logits, expected)
    assert loaded.layers[1].state.scored == 64


def test_prefixes_of_short_and_long_prompts_are_kept_apart(llama, ids, shortest):
    def logits(cache, prompt):
        return llama(prompt[:, cache.get_seq_length() :], past_key_values=cache).logits

    for first, second in ((72, shortest - 1), (shortest - 1, 72)):
        store = PrefixCache(1 << 30)
        store.prefill(llama, ids[:, :first])
        cache, _ = store.prefill(llama, ids[:, :second])
        alone, _ = PrefixCache(1 << 30).prefill(llama, ids[:, :second])
        assert torch.equal(logits(cache, ids[:, :second]), logits(alone, ids[:, :second]))
        assert is_sparse(cache) == (second >= shortest)
        again, reused = store.prefill(llama, ids[:, :second])
        assert reused == again.get_seq_length() > 0


def test_given_numbers_win(llama, ids):
    for given, sparse in ((None, True), (30, False)):
        with enable(llama, **{**AUTO, "min_prefill": given}):
            assert (
                is_sparse(llama(ids[:, :16], past_key_values=new_cache(llama)).past_key_values)
                is sparse
            )
            assert explain(llama).shortest_sparse_prompt is None
