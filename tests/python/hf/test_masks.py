"""Layers whose causality is in the mask alone, and layers that attend to something else."""

import warnings

import pytest
import torch
import transformers
from compatibility.tiny_model import build_tiny, random_prompt
from hf_helpers import EXACT, assert_close, assert_dense, new_cache
from transformers.masking_utils import create_causal_mask

from h2o_prefill import enable
from h2o_prefill.hf import NAME


def make(name, **values):
    """Build a model by the name of its class, or skip where transformers lacks it."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return build_tiny(name, **values).model


def assert_as_stock(model, **inputs):
    """Compare the logits of a model with and without us."""
    stock = model(**inputs).logits
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="h2o_prefill: ")
        with enable(model, **EXACT):
            ours = model(**inputs).logits
    torch.testing.assert_close(ours, stock, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("BigBirdPegasus", {"attention_type": "original_full"}), ("PegasusX", {}), ("NllbMoe", {})],
)
@pytest.mark.parametrize("encoded", [72, 50])
def test_a_decoder_that_is_causal_by_its_mask(make_ids, name, changes, encoded):
    model = make(f"{name}ForConditionalGeneration", **changes)
    assert_as_stock(model, input_ids=make_ids(1, encoded), decoder_input_ids=make_ids(1, 72, 5))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("image_keys", [72, 50])
@pytest.mark.parametrize("masked", [True, False])
def test_cross_attention_is_told_by_what_it_is(make_ids, implementation, image_keys, masked):
    model = make("MllamaForCausalLM", cross_attention_layers=[1])
    model.set_attn_implementation(implementation)
    for name, parameter in model.named_parameters():
        if name.endswith("attn_gate"):
            parameter.fill_(1.0)
    torch.manual_seed(2)
    inputs = {
        "input_ids": make_ids(1, 72),
        "cross_attention_states": torch.randn(1, image_keys, model.config.hidden_size),
    }
    if masked:
        inputs["cross_attention_mask"] = torch.zeros(1, 1, 72, image_keys)
    assert_as_stock(model, **inputs)


def made_before(layer, config, tokens):
    """Return a list that gets a mask for so many tokens, made before each forward of a layer."""
    masks, states = [], torch.zeros(1, tokens, 1)
    arguments = {"inputs_embeds": states, "attention_mask": None, "past_key_values": None}
    layer.register_forward_pre_hook(
        lambda *_: masks.append(create_causal_mask(config, **arguments))
    )
    return masks


def test_layers_that_add_the_mask_themselves_get_one():
    tiny = build_tiny("GitForCausalLM")
    masks = made_before(tiny.model.git.encoder, tiny.model.config, 72)
    with pytest.warns(UserWarning, match="do not use transformers' attention interface"):
        enable(tiny.model)
    tiny(random_prompt(72))
    assert masks[0].shape == (1, 1, 72, 72)


def test_masks_of_several_sizes_in_one_forward(build, ids, sparse_layers):
    llama = build("llama", "eager")
    made_before(llama.model.layers[1], llama.config, 30)
    assert_as_stock(llama, input_ids=ids)
    assert sparse_layers == [72, 72]


IMAGE, BEGIN, END = 58, 59, 60


@pytest.fixture
def vision_model(build):
    """Return a tiny Gemma 3 with a vision tower."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
    vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=build("gemma3").config,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    torch.manual_seed(7)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def implementations(model):
    """Return the attention implementation of the model, its text and its vision part."""
    config = model.config
    parts = (config, config.text_config, config.vision_config)
    return [part._attn_implementation for part in parts]


def test_the_vision_tower_is_left_alone(vision_model, make_ids, sparse_layers):
    ids = make_ids(1, 72) % 50 + 3
    vision_model.config.vision_config._attn_implementation = "eager"
    before, stock = implementations(vision_model), vision_model(ids).logits
    cache = new_cache(vision_model)
    with enable(vision_model, **EXACT):
        assert implementations(vision_model) == [before[0], NAME, "eager"]
        assert_close(vision_model(ids, past_key_values=cache).logits, stock)
        assert sparse_layers == [72] and torch.equal(cache.token_ids, ids)
    assert implementations(vision_model) == before


def test_an_image_is_attended_to_both_ways_and_so_densely(vision_model, make_ids, sparse_layers):
    ids = make_ids(1, 72) % 50 + 3
    ids[0, 10:16] = torch.tensor([BEGIN, IMAGE, IMAGE, IMAGE, IMAGE, END])
    torch.manual_seed(5)
    arguments = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 3, 16, 16),
        "token_type_ids": (ids == IMAGE).long(),
    }
    assert_dense(vision_model, "not plain causal", sparse_layers, **arguments)
