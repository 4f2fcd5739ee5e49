"""`chunked_prefill`, and prompts that `min_prefill="auto"` leaves dense: faster so."""

import pytest
import torch
from hf_helpers import GREEDY, RECALL, SPARSE, assert_close, assert_same_states, new_cache
from hf_helpers import sparse_rows as rows_of
from transformers import BatchEncoding, DynamicCache

from h2o_prefill import PrefixCache, chunked_prefill, enable, explain


@pytest.mark.parametrize(
    ("length", "chunks_per_call", "min_prefill"),
    [
        *(
            (length, chunks, None)
            for length, chunks in ((5, 9), (16, 1), (64, 2), (79, 1), (80, 2))
        ),
        *((33, 1, 1), (72, 1, 24), (40, 1, 40)),
    ],
)
def test_it_equals_one_call(llama, make_ids, length, chunks_per_call, min_prefill):
    ids, settings = make_ids(1, length), {**RECALL, "min_prefill": min_prefill}
    with enable(llama, **settings):
        cache = new_cache(llama)
        whole = llama(ids, past_key_values=cache).logits
    ours = chunked_prefill(llama, ids, chunks_per_call=chunks_per_call, **settings)
    assert_close(ours.logits, whole[:, -1:])
    assert_close([x.keys for x in ours.past_key_values.layers], [x.keys for x in cache.layers])
    assert_same_states(ours.past_key_values, cache)
    assert llama.config._attn_implementation == "sdpa"


def test_an_enabled_model_keeps_its_settings_and_calls_are_as_long_as_asked_for(llama, make_ids):
    ids, steps = make_ids(1, 79), []
    expected = chunked_prefill(llama, ids, **RECALL, chunks_per_call=2).logits
    with enable(llama, **RECALL) as handle:
        done = chunked_prefill(
            llama, ids, chunks_per_call=2, on_progress=lambda *step: steps.append(step)
        )
        assert torch.equal(done.logits, expected) and handle.active
        # Never too short to be sparse.
        assert steps == [(32, 79), (79, 79)]
        assert handle.report().layers[0].sparse_calls == 2
        with pytest.raises(ValueError, match="enabled already, with settings of its own"):
            chunked_prefill(llama, ids, **RECALL)


def test_a_prompt_may_be_lists_or_what_a_tokenizer_returns(llama, ids):
    expected = chunked_prefill(llama, ids, **RECALL).logits
    mask = torch.ones_like(ids)
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": mask})
    for prompt in (ids.tolist(), ids[0].tolist(), {"input_ids": ids}, encoding):
        assert torch.equal(chunked_prefill(llama, prompt, **RECALL).logits, expected)
    caches = [chunked_prefill(llama, ids, **RECALL).past_key_values for _ in range(2)]
    first, second = (
        chunked_prefill(llama, ids, cache=cache, **mask, **RECALL).logits
        for cache, mask in zip(caches, ({}, {"attention_mask": mask}), strict=True)
    )
    assert torch.equal(first, second)


TWO = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds must be given"),
        ({"input_ids": {"attention_mask": [1]}}, "either input_ids or inputs_embeds must be given"),
        ({"input_ids": [[1, 2], [3]]}, "lists of ints of equal length"),
        ({"input_ids": torch.zeros(1, 1, 72)}, r"input_ids must be \[B, T\] with T >= 1, got \["),
        ({"input_ids": torch.zeros(72)}, r"input_ids must be ints, got torch.float32"),
        ({"input_ids": [[0.5]]}, "token ids must be ints, got floats"),
        ({"input_ids": [1, 61]}, r"input_ids must be in \[0, 61\), got 61"),
        ({"input_ids": [-1, 5]}, r"input_ids must be in \[0, 61\), got -1"),
        ({"inputs_embeds": torch.zeros(1, 4)}, r"inputs_embeds must be \[B, T, hidden size\]"),
        ({**TWO, "attention_mask": [[1]]}, r"attention_mask must be \[1, 2\]"),
        ({**TWO, "attention_mask": [[0, 1]]}, "attention_mask must be without padding"),
        ({**TWO, "chunks_per_call": 0}, "chunks_per_call must be >= 1, got 0"),
        ({**TWO, "cache": DynamicCache()}, "a ChunkedPrefillCache, got DynamicCache"),
    ],
)
def test_wrong_arguments(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        chunked_prefill(llama, **arguments, **RECALL)


@pytest.fixture
def shortest(llama):
    """Enable the model; return the tokens of its shortest sparse prompt."""
    with enable(llama, **{**SPARSE, "config": "h2o", "min_prefill": "auto"}):
        shortest = explain(llama).shortest_sparse_prompt
        assert 16 < shortest < 32
        yield shortest


def sparse_after(model, *calls, cache=None):
    """Return how many rows of a prompt's calls go sparse."""
    before = sum(rows_of(model))
    for ids in calls:
        model(ids, past_key_values=cache)
    return sum(rows_of(model)) - before


def test_a_prompt_is_sparse_from_the_length_that_the_report_names(llama, ids, shortest):
    for length in (1, 16, shortest - 1, shortest, 72):
        rows = sparse_after(llama, ids[:, :length])
        assert rows == (2 * length if length >= shortest else 0)
    assert f"prompts of fewer than {shortest} tokens are dense" in str(explain(llama))


@pytest.mark.usefixtures("shortest")
def test_calls_of_a_known_prompt_equal_one_call(llama, ids):
    ids = ids[:, :64]
    whole = llama(ids).past_key_values
    assert_same_states(chunked_prefill(llama, ids, chunks_per_call=1).past_key_values, whole)
    text, before = llama.generate(ids, **GREEDY), sum(rows_of(llama))
    assert torch.equal(llama.generate(ids, prefill_chunk_size=16, **GREEDY), text)
    assert sum(rows_of(llama)) == before + 2 * 64


def test_a_prompt_of_unknown_length_is_dense_until_it_is_long_enough(llama, ids, shortest):
    pieces, cache = ids.split(16, dim=1), new_cache(llama)
    assert sparse_after(llama, pieces[0], cache=cache) == 0
    assert cache.min_prefill == shortest
    assert sparse_after(llama, pieces[1], cache=cache) == 32
    assert sparse_after(llama, pieces[2], cache=cache) == 32  # and stays sparse
    assert sparse_after(llama, ids[:, :10], ids[:, 10:15], cache=new_cache(llama)) == 0


def test_prefixes_of_short_and_long_prompts_are_kept_apart(llama, ids, shortest):
    def logits(cache, prompt):
        return llama(prompt[:, cache.get_seq_length() :], past_key_values=cache).logits

    for first, second in ((72, shortest - 1), (shortest - 1, 72)):
        store, prompt = PrefixCache(1 << 30), ids[:, :second]
        store.prefill(llama, ids[:, :first])
        cache, _ = store.prefill(llama, prompt)
        alone, _ = PrefixCache(1 << 30).prefill(llama, prompt)
        assert torch.equal(logits(cache, prompt), logits(alone, prompt))
        again, reused = store.prefill(llama, prompt)
        assert reused == again.get_seq_length() > 0
