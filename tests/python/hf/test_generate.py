"""`generate` in all its forms, with sparse prefill and dense decoding."""

import copy
import warnings

import pytest
import torch
import transformers
from hf_helpers import (
    EXACT,
    GREEDY,
    RECALL,
    SPARSE,
    assert_close,
    assert_same_state,
    hooked,
    new_cache,
    stock_copy,
)
from packaging.version import Version
from transformers import DynamicCache

from h2o_prefill import ChunkedPrefillCache, enable

GREEDY = {**GREEDY, "max_new_tokens": 12}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_decoding_after_sparse_prefill_sees_every_key(
    build, ids, sparse_layers, implementation, dtype, tolerance
):
    """Decode by hand with the keys of the sparse prefill and stock attention: the same logits."""
    model = build("llama", implementation).to(getattr(torch, dtype))
    token = torch.tensor([[5]])
    with enable(model, **SPARSE):
        cache = model(ids).past_key_values
        stock_cache = stock_copy(cache, model.config)
        ours = model(token, past_key_values=cache).logits
    stock = model(token, past_key_values=stock_cache).logits
    assert_close(ours, stock, tolerance)
    assert sparse_layers == [72, 72]


def test_beam_search(llama, ids, sparse_layers):
    arguments = {**GREEDY, "num_beams": 2, "num_return_sequences": 2}
    stock = llama.generate(ids, **arguments)
    with enable(llama, **EXACT):
        assert torch.equal(llama.generate(ids, **arguments), stock)
        cache = new_cache(llama)
        assert torch.equal(llama.generate(ids, past_key_values=cache, **arguments), stock)
    assert sparse_layers == [72] * 4


@pytest.mark.parametrize(
    ("layers", "with_cache", "length"), [(1, True, 72), (2, True, 49), (2, False, 72)]
)
def test_assisted_decoding_of_a_sparse_prompt_equals_plain_decoding(
    build, make_ids, layers, with_cache, length
):
    # With as many layers the assistant is the model itself, and most candidates are accepted.
    model, assistant = build("llama"), build("llama", num_hidden_layers=layers)
    ids, forwards, used = make_ids(1, length, length), [], []

    def generate(**more):
        used.append(new_cache(model))
        cache = {"past_key_values": used[-1]} if with_cache else {}
        # An end that never comes: prompt lookup of transformers 5.4 needs one.
        never = {"eos_token_id": model.config.vocab_size}
        return model.generate(ids, do_sample=False, max_new_tokens=24, **never, **cache, **more)

    with enable(model, **RECALL), enable(assistant, **RECALL):
        plain = generate()
        with hooked(model, lambda *_: forwards.append(1)):
            assert torch.equal(generate(assistant_model=assistant), plain)
        looked_up = generate(prompt_lookup_num_tokens=3)
        # Prompt lookup of transformers 5.4 may give a token too many, of stock models too.
        end = plain.shape[1] if Version(transformers.__version__) < Version("5.5") else None
        assert torch.equal(looked_up[:, :end], plain)
    assert len(forwards) < (16 if layers == 2 else 25)
    for cache in used if with_cache else ():
        assert torch.equal(cache.token_ids, plain[:, : cache.get_seq_length()])


def test_verified_candidates_leave_no_trace_in_the_state(llama, ids):
    with enable(llama, **SPARSE):
        caches = [new_cache(llama) for _ in range(2)]
        llama(ids, past_key_values=caches[0])
        candidates = torch.cat([ids, ids[:, :9]], dim=1)
        llama(candidates, past_key_values=caches[1], logits_to_keep=10)
        caches[1].crop(-9)
        for one, other in zip(*(cache.layers for cache in caches), strict=True):
            assert_same_state(one.state, other.state, 0)


@pytest.mark.parametrize("kind", [DynamicCache, ChunkedPrefillCache])
def test_chat_turns_stay_sparse(llama, make_ids, sparse_layers, kind):
    """A second long turn goes on from the first and from the tokens decoded between."""
    with enable(llama, **EXACT):
        cache = kind(config=llama.config)
        first = llama.generate(make_ids(1, 72), past_key_values=cache, **GREEDY)
        # The last generated token is not in the cache: the second turn begins with it.
        turn = torch.cat([first, make_ids(1, 40, seed=4)], dim=1)
        second = llama.generate(turn, past_key_values=cache, **GREEDY)
        assert sparse_layers == [72, 72, 41, 41]
        assert torch.equal(cache.token_ids, second[:, : cache.get_seq_length()])
        # A turn that is taken back leaves what was before it.
        cache.crop(-(cache.get_seq_length() - first.shape[1] + 1))
        assert torch.equal(cache.token_ids, first[:, :-1])
        again = llama.generate(turn, past_key_values=cache, **GREEDY)
    assert torch.equal(second, llama.generate(turn, **GREEDY)) and torch.equal(again, second)


@pytest.mark.parametrize("step", [8, 16])
def test_a_prefill_chunk_size_that_is_too_small_is_said(llama, ids, step):
    with warnings.catch_warnings(record=True) as caught, enable(llama, **SPARSE):
        warnings.simplefilter("always")
        cache = new_cache(llama)
        llama.generate(ids, past_key_values=cache, prefill_chunk_size=step, max_new_tokens=2)
    ours = [str(w.message) for w in caught if "calls of fewer than 16 tokens" in str(w.message)]
    assert len(ours) == (1 if step < 16 else 0)


@pytest.mark.parametrize("chunks", [None, 16])
@pytest.mark.parametrize("length", [40, 60, 72, 90, 100])
def test_a_prompt_begins_with_the_text_of_the_cache(llama, ids, make_ids, chunks, length):
    text, other = torch.cat([ids, ids[:, :28]], dim=1), make_ids(1, 100, seed=5)
    with enable(llama, **SPARSE):
        cache = llama(ids).past_key_values

        def answer(prompt, **more):
            options = {**GREEDY, "prefill_chunk_size": chunks, **more}
            return llama.generate(prompt, past_key_values=copy.deepcopy(cache), **options)

        for prompt in (text, other) if length <= 72 else (other,):
            if length == 72 and chunks:
                continue  # `generate` takes this for what follows the cache.
            with pytest.raises(ValueError, match=r"^input_ids must begin with the 72 tokens of"):
                answer(prompt[:, :length])
        whole = torch.ones(1, 72 + length, dtype=torch.int64)
        rest = answer(other[:, :length], attention_mask=whole)
        if length > 72:
            assert answer(text[:, :length]).shape[1] == length + 12
            after = answer(torch.cat([ids, other[:, :length]], dim=1))
            assert torch.equal(after[:, -12:], rest[:, -12:])
