"""Multi-head latent attention: the cache holds latents, attention sees keys wider than values."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from h2o_prefill import ChunkedPrefillCache, enable
from h2o_prefill.eval.compatibility.sweep import TOLERANCE
from h2o_prefill.eval.compatibility.tiny_model import build_tiny, random_prompt
from h2o_prefill.hf import ChunkedPrefillLayer

TOKENS = 72
EXACT = {"chunk_size": 16, "local_window": 64, "heavy_budget": 64, "strict": True}
SMALL = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4, "strict": True}
# The head dims of DeepSeek V2 and V3: keys of 192, values of 128.
WIDE = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS = {
    "DeepseekV2ForCausalLM": WIDE,
    "DeepseekV3ForCausalLM": WIDE,
    "MiniCPM3ForCausalLM": {},
    "LongcatFlashForCausalLM": {},
}


@pytest.fixture(params=list(MODELS))
def model(request):
    if not hasattr(transformers, request.param):
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    model = build_tiny(request.param, **MODELS[request.param]).model
    # Small weights make attention nearly uniform, which hides mistakes.
    for name, weight in model.named_parameters():
        if "q_b_proj" in name or "kv_b_proj" in name:
            weight.mul_(4)
    return model


@pytest.fixture
def prompt():
    return random_prompt(TOKENS)


def test_a_small_memory_equals_the_reference(model, prompt, reference_attention, sparse_layers):
    stock = model(prompt).logits
    with enable(model, "h2o", **SMALL):
        ours = model(prompt, use_cache=False).logits
    model.set_attn_implementation(reference_attention(chunk_size=16, budget=4))
    expected = model(prompt, use_cache=False).logits
    # As in the sweep, relative to the largest logit: float32 alone moves those of LongCat-Flash by
    # 3e-4. What the memory leaves out moves them by more than a tenth.
    scale = stock.abs().amax()
    assert (ours - expected).abs().amax() < TOLERANCE * scale
    assert (ours - stock).abs().amax() > 0.1 * scale
    assert set(sparse_layers) == {TOKENS}


def test_calls_of_one_prompt_equal_one_call(model, prompt, sparse_layers):
    with enable(model, **SMALL):
        whole = model(prompt, use_cache=False).logits
        cache = ChunkedPrefillCache(config=model.config)
        parts = [model(x, past_key_values=cache).logits for x in prompt.split([32, 40], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    layers = [layer for layer in cache.layers if isinstance(layer, ChunkedPrefillLayer)]
    assert {layer.state.length for layer in layers} == {TOKENS}
    assert sorted(set(sparse_layers)) == [32, 40, TOKENS]


def test_generating_with_room_for_everything_equals_stock(model, prompt, sparse_layers):
    arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    stock = model.generate(prompt, **arguments)
    with enable(model, **EXACT):
        assert torch.equal(model.generate(prompt, **arguments), stock)
        cache = ChunkedPrefillCache(config=model.config)
        calls = model.generate(prompt, past_key_values=cache, prefill_chunk_size=32, **arguments)
    assert torch.equal(calls, stock)
    assert sorted(set(sparse_layers)) == [32, TOKENS]


def test_padded_rows_are_what_they_are_alone(model, sparse_layers):
    batch, mask = random_prompt(TOKENS, batch=2), torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :9] = 0
    with enable(model, **SMALL):
        together = model(batch, attention_mask=mask).logits
        for row, first in ((0, 0), (1, 9)):
            alone = model(batch[row : row + 1, first:]).logits[0]
            torch.testing.assert_close(together[row, first:], alone, atol=1e-4, rtol=1e-4)
    assert set(sparse_layers) == {TOKENS, TOKENS - 9}


def test_a_plain_cache_is_gone_on_from_densely(model, prompt):
    stock = model(prompt).logits
    cache = model(prompt[:, :32]).past_key_values
    with enable(model, **EXACT), pytest.raises(NotImplementedError, match="was not filled"):
        model(prompt[:, 32:], past_key_values=cache)
    with enable(model, **{**EXACT, "strict": False}), pytest.warns(match="was not filled"):
        rest = model(prompt[:, 32:], past_key_values=cache).logits
    torch.testing.assert_close(rest, stock[:, 32:], atol=1e-4, rtol=1e-4)


def test_a_failed_forward_leaves_the_state_as_it_was(model, prompt):
    cache = ChunkedPrefillCache(config=model.config)
    with enable(model, **SMALL):
        model(prompt[:, :32], past_key_values=cache)
        expected = model(prompt[:, 32:], past_key_values=copy.deepcopy(cache)).logits
        hook = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt[:, 32:], past_key_values=cache)
        hook.remove()
        assert torch.equal(model(prompt[:, 32:], past_key_values=cache).logits, expected)
