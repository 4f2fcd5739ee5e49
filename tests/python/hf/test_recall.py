"""Lexical recall at model level: the ids of the whole prompt, once per forward, or not at all."""

import pytest
import torch
from hf_helpers import LETTERS, new_cache, watch

from h2o_prefill import PrefillConfig, enable
from h2o_prefill.vocabulary import token_text

SPARSE = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, min_prefill=2)
RECALL = SPARSE.replace(recall=2)


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
    asked = watch(monkeypatch, "lexical_recall", lambda *arguments: arguments)
    config = RECALL.replace(recall_characters=4)
    with enable(llama, config):
        llama(text)
    with enable(llama, config, tokenizer=LETTERS):
        llama(text)
    assert [call[2:] for call in asked] == [(config, None), (config, token_text(LETTERS))]


def test_the_text_of_tokens_has_neither_case_nor_spaces():
    table = token_text(LETTERS)
    assert table[[0, 3, 30]].tolist() == [[97, 48, 0], [0, 0, 0], [101, 51, 48]]
    assert token_text(LETTERS) is table


@pytest.mark.parametrize("strict", [False, True])
def test_embeddings_are_not_searched_and_it_is_said(llama, text, searches, strict):
    """A cache that saw them stays unsearched until it is reset."""
    embeddings, cache = llama.get_input_embeddings()(text), new_cache(llama)
    with enable(llama, SPARSE):
        without = llama(inputs_embeds=embeddings).logits
    with enable(llama, RECALL, strict=strict):
        if strict:
            with pytest.raises(NotImplementedError, match="recall is off"):
                llama(inputs_embeds=embeddings)
            return
        with pytest.warns(UserWarning, match="recall is off") as caught:
            assert torch.equal(llama(inputs_embeds=embeddings).logits, without)
            llama(inputs_embeds=embeddings[:, :32], past_key_values=cache)
            llama(text[:, 32:], past_key_values=cache)
        assert sum("recall is off" in str(x.message) for x in caught) == 1
        assert searches == [] and cache.token_ids is None
        cache.reset()
        llama(text, past_key_values=cache)
    assert len(searches) == 1 and torch.equal(cache.token_ids, text)
