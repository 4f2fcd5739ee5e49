"""`chunked_prefill`: a prompt in several calls, as one."""

import pytest
import torch
from hf_helpers import RECALL as SPARSE
from hf_helpers import assert_close, new_cache
from transformers import BatchEncoding, DynamicCache

from h2o_prefill import chunked_prefill, enable
from h2o_prefill.generation.runs import check_length


@pytest.mark.parametrize(
    ("length", "chunks_per_call", "min_prefill"),
    [
        *((length, chunks, None) for length in (5, 16, 64, 72, 79, 80) for chunks in (1, 2, 9)),
        *((33, 1, 1), (72, 1, 24), (40, 1, 40)),
    ],
)
def test_it_equals_one_call(llama, make_ids, length, chunks_per_call, min_prefill):
    ids, settings = make_ids(1, length), {**SPARSE, "min_prefill": min_prefill}
    with enable(llama, **settings):
        cache = new_cache(llama)
        whole = llama(ids, past_key_values=cache).logits
    ours = chunked_prefill(llama, ids, chunks_per_call=chunks_per_call, **settings)
    assert_close(ours.logits, whole[:, -1:])
    for a, b in zip(ours.past_key_values.layers, cache.layers, strict=True):
        assert_close(a.keys, b.keys)
        assert (a.state.scored == 0) == (b.state.scored == 0) == (length < 16)
        assert length < 16 or torch.equal(a.state.memory, b.state.memory)
    assert llama.config._attn_implementation == "sdpa"


def test_calls_are_as_long_as_asked_for_and_never_too_short_to_be_sparse(
    llama, make_ids, sparse_layers
):
    chunked_prefill(llama, make_ids(1, 79), chunks_per_call=2, **SPARSE)
    assert sparse_layers == [32, 32, 47, 47]


def test_an_enabled_model_keeps_its_settings(llama, ids):
    expected, steps = chunked_prefill(llama, ids, **SPARSE, chunks_per_call=1).logits, []
    with enable(llama, **SPARSE) as handle:
        done = chunked_prefill(
            llama, ids, chunks_per_call=1, on_progress=lambda *step: steps.append(step)
        )
        assert torch.equal(done.logits, expected) and handle.active
        assert handle.report().layers[0].sparse_calls == len(steps)
        with pytest.raises(ValueError, match="enabled already, with settings of its own"):
            chunked_prefill(llama, ids, **SPARSE)
    length = ids.shape[1]
    assert steps[0] == (16, length) and steps[-1] == (length, length) and len(steps) > 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_length_are_said(build, make_ids, kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        rope |= {**factors, "original_max_position_embeddings": 48}
    most = 48 if kind == "dynamic" else 96
    model = build("llama", rope_parameters=rope, max_position_embeddings=most)
    with pytest.warns(UserWarning, match=f"{kind} rotary embeddings depend on the tokens"):
        chunked_prefill(model, make_ids(1, 72), chunks_per_call=1, **SPARSE)
    chunked_prefill(model, make_ids(1, 40), chunks_per_call=1, **SPARSE)


def test_a_text_that_is_longer_than_the_model_was_made_for_is_said_once(build, ids):
    model = build("llama", max_position_embeddings=70)
    with enable(model, **SPARSE):
        cache = model(ids[:, :70]).past_key_values
        with pytest.warns(
            UserWarning, match="made for texts of up to 70 tokens .*, got 72"
        ) as said:
            chunked_prefill(model, ids, chunks_per_call=1)  # before the first chunk
            model(ids[:, 70:71], past_key_values=cache)
    assert [x.filename for x in said if "made for" in str(x.message)] == [__file__]
    with pytest.raises(ValueError, match="must be <= 70, the longest that the model takes, got 71"):
        check_length(model, 71, "prompt")


def test_a_prompt_may_be_lists_or_what_a_tokenizer_returns(llama, ids):
    expected = chunked_prefill(llama, ids, **SPARSE).logits
    mask = torch.ones_like(ids)
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": mask})
    for prompt in (ids.tolist(), ids[0].tolist(), {"input_ids": ids}, encoding):
        assert torch.equal(chunked_prefill(llama, prompt, **SPARSE).logits, expected)
    assert torch.equal(chunked_prefill(llama, ids, attention_mask=mask, **SPARSE).logits, expected)
    cache = chunked_prefill(llama, encoding, **SPARSE).past_key_values
    more = chunked_prefill(llama, ids, cache=cache, attention_mask=mask, **SPARSE).logits
    cache = chunked_prefill(llama, ids, **SPARSE).past_key_values
    assert torch.equal(chunked_prefill(llama, ids, cache=cache, **SPARSE).logits, more)


TWO = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds must be given"),
        ({"input_ids": {"attention_mask": [1]}}, "either input_ids or inputs_embeds must be given"),
        ({"input_ids": [[1, 2], [3]]}, "lists of ints of equal length"),
        ({"input_ids": ["a"]}, "lists of ints of equal length"),
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
        ({**TWO, "chunk": 3}, "is no setting"),
    ],
)
def test_wrong_arguments(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        chunked_prefill(llama, **arguments, **SPARSE)
