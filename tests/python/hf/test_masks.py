"""Layers whose causality is in the mask alone, and layers that attend to something else."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from compatibility.tiny_model import build_tiny, random_prompt
from hf_helpers import EXACT
from transformers.masking_utils import create_causal_mask

from h2o_prefill import enable

ENCODER_DECODER = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "init_std": 0.3,
}
MOE = {
    "num_experts": 2,
    "encoder_sparse_step": 1,
    "decoder_sparse_step": 1,
    "expert_capacity": 100,
}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(name, **values):
    """Build a model by the name of its class, or skip where transformers lacks it."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(1)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**values)).eval()


def assert_as_stock(model, **inputs):
    """Compare the logits of a model with and without us."""
    stock = model(**inputs).logits
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="h2o_prefill: ")
        with enable(model, **EXACT):
            ours = model(**inputs).logits
    torch.testing.assert_close(ours, stock, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "more"),
    [("BigBirdPegasus", {"attention_type": "original_full"}), ("PegasusX", {}), ("NllbMoe", MOE)],
)
@pytest.mark.parametrize("encoded", [72, 50])
def test_a_decoder_that_is_causal_by_its_mask(make_ids, name, more, encoded):
    model = make(f"{name}ForConditionalGeneration", **{**ENCODER_DECODER, **more})
    assert_as_stock(model, input_ids=make_ids(1, encoded), decoder_input_ids=make_ids(1, 72, 5))


@pytest.mark.parametrize("name", ["Gemma", "Gemma2"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_attention_that_may_be_bidirectional(make_ids, name, bidirectional):
    model = make(
        f"{name}ForCausalLM",
        **TEXT,
        use_bidirectional_attention=bidirectional,
        attn_implementation="eager",
    )
    assert_as_stock(model, input_ids=make_ids(1, 72))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("image_keys", [72, 50])
@pytest.mark.parametrize("masked", [True, False])
def test_cross_attention_is_told_by_what_it_is(make_ids, implementation, image_keys, masked):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = make(
        "MllamaForCausalLM",
        **TEXT,
        cross_attention_layers=[1],
        rope_parameters=rope,
    )
    model.set_attn_implementation(implementation)
    for name, parameter in model.named_parameters():
        if name.endswith("attn_gate"):
            parameter.fill_(1.0)
    torch.manual_seed(2)
    inputs = {
        "input_ids": make_ids(1, 72),
        "cross_attention_states": torch.randn(1, image_keys, 32),
    }
    if masked:
        inputs["cross_attention_mask"] = torch.zeros(1, 1, 72, image_keys)
    assert_as_stock(model, **inputs)


def test_layers_that_add_the_mask_themselves_get_one():
    tiny, masks = build_tiny("GitForCausalLM"), []

    def make_mask(*_):
        states = torch.zeros(1, 72, 1)
        arguments = {"attention_mask": None, "past_key_values": None}
        masks.append(create_causal_mask(tiny.model.config, inputs_embeds=states, **arguments))

    tiny.model.git.encoder.register_forward_pre_hook(make_mask)
    with pytest.warns(UserWarning, match="do not use transformers' attention interface"):
        enable(tiny.model)
    tiny(random_prompt(72))
    assert masks[0].shape == (1, 1, 72, 72)


def test_masks_of_several_sizes_in_one_forward(build, ids, sparse_layers):
    llama = build("llama", "eager")

    def make_mask(*_):
        states = torch.zeros(1, 30, 1)
        arguments = {"attention_mask": None, "past_key_values": None}
        create_causal_mask(llama.config, inputs_embeds=states, **arguments)

    stock = llama(ids).logits
    llama.model.layers[1].register_forward_pre_hook(make_mask)
    with enable(llama, **EXACT):
        ours = llama(ids).logits
    torch.testing.assert_close(ours, stock, atol=2e-5, rtol=1e-5)
    assert sparse_layers == [72, 72]
