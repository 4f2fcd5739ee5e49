"""Layers with a recurrence beside their attention: Falcon-H1, Zaya, Zamba 2."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers

from h2o_prefill import ChunkedPrefillCache, enable
from h2o_prefill.eval.compatibility.sweep import TOLERANCE
from h2o_prefill.eval.compatibility.tiny_model import build_tiny, random_prompt
from h2o_prefill.hf import ChunkedPrefillLayer
from h2o_prefill.hf.hybrid_layer import HybridLayer

TOKENS = 72
EXACT = {"chunk_size": 16, "local_window": 64, "heavy_budget": 64, "strict": True}
SMALL = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4, "strict": True}


@pytest.fixture(params=["FalconH1ForCausalLM", "ZayaForCausalLM", "Zamba2ForCausalLM"])
def model(request):
    if HybridLayer is None or not hasattr(transformers, request.param):
        pytest.skip(
            f"transformers {transformers.__version__} has no such layer, or {request.param}"
        )
    model = build_tiny(request.param).model
    # Small weights make attention nearly uniform, which hides mistakes.
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.mul_(4)
    return model


@pytest.fixture
def prompt():
    return random_prompt(TOKENS)


def states(cache):
    return [layer.state for layer in cache.layers if isinstance(layer, ChunkedPrefillLayer)]


def test_a_small_memory_equals_the_reference(model, prompt, reference_attention, sparse_layers):
    stock = model(prompt).logits
    with enable(model, "h2o", **SMALL):
        ours = model(prompt, use_cache=False).logits
    model.set_attn_implementation(reference_attention(chunk_size=16, budget=4))
    expected = model(prompt, use_cache=False).logits
    scale = stock.abs().amax()
    assert (ours - expected).abs().amax() < TOLERANCE * scale
    assert (ours - stock).abs().amax() > 10 * TOLERANCE * scale
    assert set(sparse_layers) == {TOKENS}


def test_calls_of_one_prompt_equal_one_call(model, prompt, sparse_layers):
    cache = ChunkedPrefillCache(config=model.config)
    with enable(model, **SMALL):
        whole = model(prompt, use_cache=False).logits
        for _ in range(2):
            parts = [model(x, past_key_values=cache).logits for x in prompt.split([32, 40], 1)]
            assert {state.length for state in states(cache)} == {TOKENS}
            scale = TOLERANCE * whole.abs().amax().item()
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=scale, rtol=0)
            cache.reset()
            assert set(states(cache)) == {None}
    assert sorted(set(sparse_layers)) == [32, 40, TOKENS]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_cache_goes_on_alike(model, prompt, how):
    cache = ChunkedPrefillCache(config=model.config)
    with enable(model, **SMALL):
        model(prompt[:, :32], past_key_values=cache)
        twin = how(cache)
        ours = model(prompt[:, 32:], past_key_values=cache).logits
        assert torch.equal(model(prompt[:, 32:], past_key_values=twin).logits, ours)


def test_reordered_rows_go_on_alike(model):
    batch, order = random_prompt(TOKENS, batch=2), torch.tensor([1, 0])
    caches = [ChunkedPrefillCache(config=model.config) for _ in range(2)]
    with enable(model, **SMALL):
        for cache, rows in zip(caches, (batch, batch[order]), strict=True):
            model(rows[:, :32], past_key_values=cache)
        caches[0].reorder_cache(order)
        ours, expected = (
            model(batch[order][:, 32:], past_key_values=cache).logits for cache in caches
        )
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_generating_with_room_for_everything_equals_stock(model, prompt, sparse_layers):
    arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    stock = model.generate(prompt, **arguments)
    with enable(model, **EXACT):
        assert torch.equal(model.generate(prompt, **arguments), stock)
        cache = ChunkedPrefillCache(config=model.config)
        assert torch.equal(model.generate(prompt, past_key_values=cache, **arguments), stock)
    assert set(sparse_layers) == {TOKENS}


def test_a_failed_forward_marks_the_cache(model, prompt):
    """The recurrence is changed in place and cannot be put back."""
    cache = ChunkedPrefillCache(config=model.config)
    with enable(model, **SMALL):
        expected = model(prompt, past_key_values=cache).logits
        cache.reset()
        model(prompt[:, :32], past_key_values=cache)
        hook = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt[:, 32:], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="half updated"):
            model(prompt[:, 32:], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(prompt, past_key_values=cache).logits, expected)


def test_settings_by_layer_need_numbers(prompt):
    model = build_tiny("Zamba2ForCausalLM").model
    stock = model(prompt).logits
    settings = {**SMALL, "strict": False, "wide_layers": (1,)}
    with enable(model, **settings), pytest.warns(match="cannot tell them apart"):
        torch.testing.assert_close(model(prompt).logits, stock, atol=1e-4, rtol=1e-4)
