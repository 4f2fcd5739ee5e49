"""Models of several parts: only the text decoder is touched, and all come back as they were."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_helpers import EXACT, assert_close, assert_dense, new_cache

from h2o_prefill import enable
from h2o_prefill.hf import NAME

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
