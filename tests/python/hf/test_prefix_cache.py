"""A prompt that begins as a stored text gives what two calls on one cache give."""

from __future__ import annotations

import io

import pytest
import torch
import transformers
from compatibility.tiny_model import build_tiny
from hf_helpers import GREEDY, H2O, RECALL, in_calls, new_cache

from h2o_prefill import PrefixCache, enable
from h2o_prefill.hf.layer import HybridLayer
from h2o_prefill.selection import snapkv

ROOM = 1 << 30


def prefilled(model, ids):
    cache = new_cache(model)
    in_calls(model, cache, ids, (ids.shape[1],))
    return cache


def test_a_prompt_goes_on_from_the_longest_text_that_it_begins_with(llama, make_ids):
    ids = make_ids(1, 120)
    prefixes = PrefixCache(ROOM)
    with enable(llama, **RECALL) as handle:
        assert prefixes.find(llama, ids).get_seq_length() == 0
        for length in (40, 72, 120):
            prefixes.add(prefilled(llama, ids[:, :length]))
        other = ids[:, :72].clone()
        other[:, 30] += 1
        prefixes.add(prefilled(llama, other))
        assert len(prefixes) == 4
        calls = handle.report().layers[0].sparse_rows
        cache = prefixes.find(llama, ids)
        assert cache.get_seq_length() == 72 and torch.equal(cache.token_ids, ids[:, :72])
        answer = llama.generate(ids, past_key_values=cache, **GREEDY)
        assert handle.report().layers[0].sparse_rows == calls + 48
        reference = prefilled(llama, ids[:, :72])
        assert torch.equal(answer, llama.generate(ids, past_key_values=reference, **GREEDY))
        # The next turn of a chat.
        prefixes.add(cache)
        turn = torch.cat([answer, ids[:, :20]], dim=1)
        cache = prefixes.find(llama, turn)
        assert cache.get_seq_length() == answer.shape[1] - 1
        assert torch.equal(
            llama.generate(turn, past_key_values=cache, **GREEDY),
            llama.generate(turn, past_key_values=reference, **GREEDY),
        )


def test_texts_of_others_are_not_found(build, llama, ids):
    prefixes, longer = PrefixCache(ROOM), torch.cat([ids, ids], dim=1)
    with enable(llama, **RECALL):
        prefixes.add(prefilled(llama, ids))
        assert prefixes.find(llama, longer).get_seq_length() == 72
        assert prefixes.find(llama, ids).get_seq_length() == 0  # nothing would be left to prefill
    with enable(llama, **H2O):
        assert prefixes.find(llama, longer).get_seq_length() == 0
    assert prefixes.find(llama, longer).get_seq_length() == 0
    other = build("llama")
    with enable(other, **RECALL):
        assert prefixes.find(other, longer).get_seq_length() == 0
    with enable(llama, **RECALL):
        assert prefixes.find(llama, longer).get_seq_length() == 72
        prefixes.clear()
        assert prefixes.find(llama, longer).get_seq_length() == 0 == prefixes.nbytes


def test_the_least_recently_used_texts_are_removed(llama, make_ids):
    texts = make_ids(3, 40)
    with enable(llama, **H2O):
        caches = [prefilled(llama, text[None]) for text in texts]
        prefixes = PrefixCache(ROOM)
        prefixes.add(caches[0])
        each = prefixes.nbytes
        prefixes = PrefixCache(2 * each)

        def found(row):
            longer = torch.cat([texts[row], texts[row]])[None]
            return prefixes.find(llama, longer).get_seq_length() == 40

        prefixes.add(caches[0])
        prefixes.add(caches[1])
        prefixes.add(caches[1])
        assert len(prefixes) == 2 and found(0)
        prefixes.add(caches[2])
        assert [found(row) for row in range(3)] == [True, False, True]
        assert 0 < prefixes.nbytes <= prefixes.max_bytes
        none = PrefixCache(0)
        none.add(caches[0])
        assert len(none) == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "FalconH1ForCausalLM"])
def test_a_text_occupies_what_it_needs(build, make_ids, name):
    recurrent = name == "FalconH1ForCausalLM"
    if recurrent and HybridLayer is None:
        pytest.skip(f"transformers {transformers.__version__} has not its layers")
    model = build_tiny(name).model if recurrent else build(name)
    prefixes, needed = PrefixCache(ROOM), 0
    with enable(model, **H2O, select=None if recurrent else snapkv):
        cache = prefilled(model, make_ids(1, 38))
        prefixes.add(cache)
    for layer in cache.layers:
        parts = [{name: x for name, x in vars(layer).items() if name != "_scores"}]
        parts += [vars(layer.state)] if getattr(layer, "state", None) else []
        parts += [getattr(layer, x) for x in ("conv_states", "recurrent_states") if recurrent]
        needed += sum(x.nbytes for part in parts for x in part.values() if torch.is_tensor(x))
    file = io.BytesIO()
    torch.save(prefixes._held, file)
    assert 0 < file.tell() - prefixes.nbytes < 20_000 < prefixes.nbytes < 1.15 * needed


def test_turns_of_a_chat_share_keys_and_values(llama, make_ids):
    ids, prefixes, alone = make_ids(1, 240), PrefixCache(ROOM), PrefixCache(ROOM)
    with enable(llama, **H2O):
        for length in range(24, 241, 24):
            cache = prefixes.find(llama, ids[:, :length])
            past = cache.get_seq_length()
            assert past == length - 24
            in_calls(llama, cache, ids[:, past:length], (length - past,))
            prefixes.add(cache)
        alone.add(cache)
        # Scores and memory sets are of each turn.
        assert alone.nbytes < prefixes.nbytes < 1.5 * alone.nbytes
        whole = prefilled(llama, ids[:, :24])
        for length in range(48, 241, 24):
            in_calls(llama, whole, ids[:, length - 24 : length], (24,))
            found = prefixes.find(llama, torch.cat([ids[:, :length], ids[:, :1]], dim=1))
            for ours, layer in zip(found.layers, whole.layers, strict=True):
                assert torch.equal(ours.keys, layer.keys) and torch.equal(ours.values, layer.values)


def test_threads_share_texts(llama, make_ids, spawn):
    ids, prefixes = make_ids(5, 100), PrefixCache(ROOM)
    ids[:, :48] = ids[:1, :48]
    with enable(llama, **RECALL):
        expected = []
        for row in ids:
            cache = prefilled(llama, row[None, :48])
            expected.append(llama.generate(row[None], past_key_values=cache, **GREEDY))
        prefixes.add(prefilled(llama, ids[:1, :48]))
        answers = [None] * 5

        def answer(row):
            for _ in range(3):
                cache = prefixes.find(llama, ids[row : row + 1])
                answers[row] = llama.generate(ids[row : row + 1], past_key_values=cache, **GREEDY)
                prefixes.add(cache)
                prefixes.clear() if row == 4 else None

        for thread in [spawn(lambda row=row: answer(row)) for row in range(5)]:
            thread.join()
    assert all(map(torch.equal, answers, expected))


def test_wrong_arguments(llama, ids, make_ids):
    prefixes = PrefixCache(ROOM)
    with pytest.raises(ValueError, match="max_bytes must be >= 0, got -1"):
        PrefixCache(-1)
    with pytest.raises(ValueError, match=r"input_ids must be \[1, T\]"):
        prefixes.find(llama, make_ids(2, 5))
    with pytest.raises(ValueError, match="cache must hold one row of known token ids"):
        prefixes.add(new_cache(llama))
    with enable(llama, **H2O):
        with pytest.raises(ValueError, match="cache must hold one row"):
            prefixes.add(prefilled(llama, make_ids(2, 40)))
        cache = new_cache(llama)
        llama(inputs_embeds=llama.get_input_embeddings()(ids), past_key_values=cache)
        with pytest.raises(ValueError, match="of known token ids"):
            prefixes.add(cache)
