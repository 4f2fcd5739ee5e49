"""Layers with a recurrence beside their attention, and multi-head latent attention.

Caches hold more than keys and values, or latents, and keys may be wider than values.
"""

import copy
import pickle

import pytest
import torch
import transformers
from compatibility.examine import TOLERANCE
from compatibility.tiny_model import build_tiny, random_prompt
from hf_helpers import EXACT, SPARSE, assert_close, failing, in_calls, new_cache

from h2o_prefill import enable
from h2o_prefill.hf import ChunkedPrefillLayer
from h2o_prefill.hf.layer import HybridLayer

TOKENS = 72
EXACT = {**EXACT, "strict": True}
SMALL = {**SPARSE, "strict": True}
RECURRENT = {"FalconH1ForCausalLM": {}, "ZayaForCausalLM": {}, "Zamba2ForCausalLM": {}}
# The head dims of DeepSeek V2 and V3: keys of 192, values of 128.
WIDE = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT = {
    "DeepseekV2ForCausalLM": WIDE,
    "DeepseekV3ForCausalLM": WIDE,
    "MiniCPM3ForCausalLM": {},
    "LongcatFlashForCausalLM": {},
}
# Weights of queries and keys, after the latents where there are some.
SHARPENED = ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")

recurrent = pytest.mark.parametrize("model", RECURRENT, indirect=True)
latent = pytest.mark.parametrize("model", LATENT, indirect=True)
all_models = pytest.mark.parametrize("model", [*RECURRENT, *LATENT], indirect=True)


@pytest.fixture
def model(request):
    name = request.param
    if not hasattr(transformers, name) or (name in RECURRENT and HybridLayer is None):
        pytest.skip(f"transformers {transformers.__version__} has no {name}, or not its layers")
    model = build_tiny(name, **{**RECURRENT, **LATENT}[name]).model
    # Small weights make attention nearly uniform, which hides mistakes.
    for weight_name, weight in model.named_parameters():
        if any(part in weight_name for part in SHARPENED):
            weight.mul_(4)
    return model


@pytest.fixture
def prompt():
    return random_prompt(TOKENS)


def states(cache):
    return [layer.state for layer in cache.layers if isinstance(layer, ChunkedPrefillLayer)]


@all_models
def test_a_small_memory_equals_the_reference(model, prompt, logits_by_the_oracle, sparse_layers):
    stock = model(prompt).logits
    with enable(model, "h2o", **SMALL) as handle:
        ours = model(prompt, use_cache=False).logits
    expected = logits_by_the_oracle(model, prompt, handle.config)
    # As in the sweep, relative to the largest logit: float32 alone moves LongCat-Flash's by
    # 3e-4. A recurrence carries most of what the memory leaves out; without one, that moves logits
    # by more than a tenth.
    scale = stock.abs().amax()
    moved = 0.1 if type(model).__name__ in LATENT else 10 * TOLERANCE
    assert (ours - expected).abs().amax() < TOLERANCE * scale
    assert (ours - stock).abs().amax() > moved * scale
    assert set(sparse_layers) == {TOKENS}


@all_models
def test_calls_of_one_prompt_equal_one_call(model, prompt, sparse_layers):
    cache = new_cache(model)
    with enable(model, **SMALL):
        whole = model(prompt, use_cache=False).logits
        for _ in range(2):
            parts = in_calls(model, cache, prompt, (32, 40))
            assert {state.scored for state in states(cache)} == {TOKENS}
            scale = TOLERANCE * whole.abs().amax().item()
            torch.testing.assert_close(parts, whole, atol=scale, rtol=0)
            cache.reset()
            assert {state.scored for state in states(cache)} == {0}
    assert sorted(set(sparse_layers)) == [32, 40, TOKENS]


@recurrent
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_cache_goes_on_alike(model, prompt, how):
    cache = new_cache(model)
    with enable(model, **SMALL):
        model(prompt[:, :32], past_key_values=cache)
        twin = how(cache)
        ours = model(prompt[:, 32:], past_key_values=cache).logits
        assert torch.equal(model(prompt[:, 32:], past_key_values=twin).logits, ours)


@recurrent
def test_reordered_rows_go_on_alike(model):
    batch, order = random_prompt(TOKENS, batch=2), torch.tensor([1, 0])
    caches = [new_cache(model) for _ in range(2)]
    with enable(model, **SMALL):
        for cache, rows in zip(caches, (batch, batch[order]), strict=True):
            model(rows[:, :32], past_key_values=cache)
        caches[0].reorder_cache(order)
        ours, expected = (
            model(batch[order][:, 32:], past_key_values=cache).logits for cache in caches
        )
    assert_close(ours, expected, 1e-4)


@recurrent
def test_a_failed_forward_marks_the_cache(model, prompt):
    """The recurrence is changed in place and cannot be put back."""
    cache = new_cache(model)
    with enable(model, **SMALL):
        expected = model(prompt, past_key_values=cache).logits
        cache.reset()
        model(prompt[:, :32], past_key_values=cache)
        with failing(model.lm_head):
            model(prompt[:, 32:], past_key_values=cache)
        with pytest.raises(RuntimeError, match="half updated"):
            model(prompt[:, 32:], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(prompt, past_key_values=cache).logits, expected)


def test_settings_by_layer_need_numbers(prompt):
    model = build_tiny("Zamba2ForCausalLM").model
    stock = model(prompt).logits
    settings = {**SMALL, "strict": False, "dense_layers": (1,)}
    with enable(model, **settings), pytest.warns(match="cannot tell them apart"):
        assert_close(model(prompt).logits, stock, 1e-4)
