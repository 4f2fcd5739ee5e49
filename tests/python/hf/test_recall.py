"""Lexical recall at model level: the ids of the whole prompt, once per forward, or not at all."""

from __future__ import annotations

import inspect

import pytest
import torch
from hf_helpers import assert_close, in_calls, new_cache, watch

from h2o_prefill import PrefillConfig, enable, ops

SPARSE = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, min_prefill=2)
RECALL = SPARSE.replace(recall=2, recall_block=8)


@pytest.fixture
def searches(monkeypatch):
    """Return a list that gets (ids, begin) of every search."""
    return watch(monkeypatch, "lexical_recall", lambda ids, begin, *_: (ids.clone(), begin))


@pytest.fixture
def text(make_ids):
    """Return a prompt that repeats itself."""
    return make_ids(1, 24).repeat(1, 3)


def test_one_search_for_all_layers(llama, text, searches):
    with enable(llama, SPARSE):
        without = llama(text).logits
        assert searches == []
    with enable(llama, RECALL):
        ours = llama(text).logits
        llama.generate(text, max_new_tokens=4, do_sample=False)
    assert [begin for _, begin in searches] == [0, 0]
    assert torch.equal(searches[0][0], text)
    assert not torch.allclose(ours, without, atol=1e-3)


def test_the_search_has_the_settings(llama, text, monkeypatch):
    signature = inspect.signature(ops.lexical_recall)
    asked = watch(monkeypatch, "lexical_recall", lambda *a, **k: signature.bind(*a, **k).arguments)
    settings = {"block": 4, "max_matches": 7, "max_suffix": 5, "span": 3, "max_count": 9}
    names = {"max_matches": "recall", "max_suffix": "recall_suffix"}
    changes = {names.get(name, f"recall_{name}"): value for name, value in settings.items()}
    with enable(llama, SPARSE.replace(**changes)):
        llama(text)
    assert {name: asked[0][name] for name in settings} == settings
    assert asked[0]["chunk_size"] == 16


def test_what_is_recalled_is_seen(llama, text):
    """Recall of everything equals dense attention."""
    stock = llama(text).logits
    ids = torch.full_like(text, 7)
    constant = llama(ids).logits
    everything = SPARSE.replace(recall=72, recall_block=16, recall_suffix=1, recall_max_count=99)
    with enable(llama, everything):
        assert_close(llama(ids).logits, constant)
        assert not torch.allclose(llama(text).logits, stock, atol=1e-3)


def test_later_calls_search_the_whole_prompt(llama, text, searches):
    with enable(llama, RECALL):
        whole = llama(text).logits
        assert_close(in_calls(llama, new_cache(llama), text, (32, 40)), whole)
    assert [(tuple(ids.shape), begin) for ids, begin in searches] == [
        ((1, 72), 0),
        ((1, 32), 0),
        ((1, 72), 32),
    ]
    assert torch.equal(searches[-1][0], text)


def test_embeddings_cannot_be_searched(llama, text, searches):
    embeddings = llama.get_input_embeddings()(text)
    with enable(llama, SPARSE):
        without = llama(inputs_embeds=embeddings).logits
    with enable(llama, RECALL), pytest.warns(UserWarning, match="recall is off") as caught:
        assert torch.equal(llama(inputs_embeds=embeddings).logits, without)
        llama(inputs_embeds=embeddings)
    assert len(caught) == 1 and searches == []
    with enable(llama, RECALL, strict=True), pytest.raises(NotImplementedError):
        llama(inputs_embeds=embeddings)


def test_a_cache_that_saw_embeddings_stays_unsearched_until_reset(llama, text, searches):
    cache = new_cache(llama)
    with enable(llama, RECALL), pytest.warns(UserWarning, match="recall is off"):
        llama(inputs_embeds=llama.get_input_embeddings()(text[:, :32]), past_key_values=cache)
        llama(text[:, 32:], past_key_values=cache)
        assert searches == [] and cache.token_ids is None
        cache.reset()
        llama(text, past_key_values=cache)
    assert len(searches) == 1 and torch.equal(cache.token_ids, text)
