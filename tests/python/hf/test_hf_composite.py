"""Models of several parts: only the text decoder is touched, and all come back as they were."""

from __future__ import annotations

import pytest
import torch
import transformers

from h2o_prefill import ChunkedPrefillCache, enable
from h2o_prefill.hf import NAME

SPARSE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}
EXACT = {"chunk_size": 16, "local_window": 64, "heavy_budget": 64}
IMAGE, BEGIN, END = 58, 59, 60


@pytest.fixture
def vision_model(build):
    """Return a tiny Gemma 3 with a vision tower."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
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


def check_is_dense(model, arguments, reason, sparse_layers):
    """Assert that an enabled model warns of a reason and gives what the stock model gives."""
    stock = model(**arguments).logits
    with enable(model, **SPARSE), pytest.warns(UserWarning, match=reason):
        ours = model(**arguments).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


def test_the_vision_tower_is_left_alone(vision_model, make_ids, sparse_layers):
    ids = make_ids(1, 72) % 50 + 3
    vision_model.config.vision_config._attn_implementation = "eager"
    before, stock = implementations(vision_model), vision_model(ids).logits
    with enable(vision_model, **EXACT):
        assert implementations(vision_model) == [before[0], NAME, "eager"]
        torch.testing.assert_close(vision_model(ids).logits, stock, atol=1e-5, rtol=1e-5)
        assert sparse_layers == [72]
    assert implementations(vision_model) == before


def test_text_through_a_cache_of_a_vision_model(vision_model, make_ids):
    ids = make_ids(1, 72) % 50 + 3
    with enable(vision_model, recall=2, recall_block=8, **SPARSE):
        whole = vision_model(ids).logits
        cache = ChunkedPrefillCache(config=vision_model.config)
        parts = [vision_model(p, past_key_values=cache).logits for p in ids.split([32, 40], 1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.token_ids, ids)


def test_an_image_is_attended_to_both_ways_and_so_densely(vision_model, make_ids, sparse_layers):
    ids = make_ids(1, 72) % 50 + 3
    ids[0, 10:16] = torch.tensor([BEGIN, IMAGE, IMAGE, IMAGE, IMAGE, END])
    torch.manual_seed(5)
    arguments = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 3, 16, 16),
        "token_type_ids": (ids == IMAGE).long(),
    }
    check_is_dense(vision_model, arguments, "not plain causal", sparse_layers)


def test_an_encoder_decoder_is_dense(make_ids, sparse_layers):
    config = transformers.BartConfig(
        vocab_size=61,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
        init_std=0.2,
    )
    torch.manual_seed(7)
    model = transformers.BartForConditionalGeneration(config).eval()
    arguments = {"input_ids": make_ids(1, 50), "decoder_input_ids": make_ids(1, 40, seed=4)}
    check_is_dense(model, arguments, "encoder-decoder", sparse_layers)


def test_an_encoder_has_no_layer_for_us(make_ids):
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
    )
    model, ids = transformers.BertModel(config).eval(), make_ids(1, 50)
    stock = model(ids).last_hidden_state
    with pytest.warns(UserWarning, match="no layer of BertModel can be sparse"):
        handle = enable(model, **SPARSE)
    with handle:
        assert torch.equal(model(ids).last_hidden_state, stock)
