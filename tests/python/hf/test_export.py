"""Exported models: one graph that prefills and decodes as an enabled model does."""

import copy
import warnings

import pytest
import torch
from hf_helpers import LETTERS, assert_close, new_cache

from h2o_prefill import PrefillConfig, enable
from h2o_prefill.generation.weights import keeps_numbers, with_packed_weights
from h2o_prefill.hf.export import describe_package, export_model
from h2o_prefill.package import PackageInfo
from h2o_prefill.vocabulary import token_text

CONFIG = PrefillConfig.parse(
    "h2o,chunk_size=16,local_window=4,heavy_budget=4,recall=2,"
    "error_rows=4,error_threshold=0.05,max_widen=2,"
    "recall_characters=3,min_prefill=none"
)
# Sparse, sparse after a history, decoded, short.
CALLS = (60, 83, 1, 1, 5)


MIXED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in ("mistral-window", "gpt-oss", "granite")),
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in (
                *("llama", "qwen2", "qwen3", "mistral"),
                *("gemma2", "gemma3", "phi3", "smollm3"),
            )
        ),
        # The second layer alone has a window: shorter than the first call, and longer.
        ("qwen2", MIXED),
        pytest.param("qwen2", {**MIXED, "sliding_window": 70}, marks=pytest.mark.slow),
    ],
)
def test_a_graph_prefills_and_decodes_as_the_enabled_model(build, prompt, name, changes):
    warnings.filterwarnings("ignore", message=r"h2o_prefill: .* does not fit into")
    model = build(name, **changes)
    implementation = model.config._attn_implementation
    info = describe_package(model, CONFIG, capacity=prompt.shape[1])
    graph = export_model(model, info, token_text(LETTERS)).module()
    assert model.config._attn_implementation == implementation
    for _ in range(2):
        cache, state = new_cache(model), info.new_state()
        for piece in prompt.split(CALLS, dim=1):
            with enable(model, CONFIG, tokenizer=LETTERS):
                expected = model(piece, past_key_values=cache).logits[0]
            rows = torch.arange(max(0, piece.shape[1] - 3), piece.shape[1])
            ours = graph(piece, rows, *state)
            assert_close(ours, expected[rows])
        assert torch.equal(state[0], prompt)
        assert state[1].tolist() == [150, 140]


def test_what_a_package_says_of_itself(build):
    model = build("qwen3", eos_token_id=[0, 2])
    info = describe_package(model.to(torch.bfloat16), CONFIG, 128)
    assert (info.model, info.dtype, info.capacity) == ("Qwen3ForCausalLM", "bfloat16", 128)
    assert (info.layers, info.kv_heads, info.head_dim, info.vocabulary) == (2, 2, 32, 61)
    assert info.end_ids == (0, 2) and info.config == CONFIG
    assert PackageInfo.from_metadata(info.to_metadata()) == info
    prompt, position, key, value, scores, memory, errors = info.new_state()[:7]
    assert prompt.shape == (1, 128) and position.tolist() == [0, 0]
    assert key.shape == value.shape == (1, 2, 128, 32) and key.dtype == torch.bfloat16
    assert scores.shape == (1, 2, 128) and scores.dtype == torch.float32
    assert memory.shape == (1, 2, 8) and info.new_state()[10].shape == (1, 2, 16)
    assert torch.equal(errors, torch.zeros(1, 2, 4))


@pytest.mark.parametrize(
    ("name", "changes", "capacity", "message"),
    [
        ("llama4", {}, 128, "causal, with full attention or windows"),
        ("bloom", {}, 128, "one attention layer in each layer"),
        ("llama", {}, 1, r"capacity must be in \[2, 512\]"),
        ("llama", {}, 513, r"capacity must be in \[2, 512\], .* got 513"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            128,
            "rotary frequencies that stay the same, got dynamic",
        ),
    ],
)
def test_models_that_cannot_be_exported_are_refused(build, name, changes, capacity, message):
    with pytest.raises(ValueError, match=message):
        describe_package(build(name, **changes), CONFIG, capacity)


def test_a_graph_that_differs_from_its_model_is_refused(build, monkeypatch):
    model = build("llama")
    rotary = type(model.model.rotary_emb)
    rotate = rotary.forward

    def rotate_otherwise(self, x, position_ids):
        return rotate(self, x, position_ids * (1 + torch.compiler.is_exporting()))

    monkeypatch.setattr(rotary, "forward", rotate_otherwise)
    with pytest.raises(ValueError, match="logits of its graph differ by"):
        export_model(model, describe_package(model, CONFIG, 128))


@pytest.mark.parametrize("weights", ["bfloat16", "float16", "int8"])
def test_packed_weights(build, prompt, weights):
    model = build("qwen2", tie_word_embeddings=True)  # its projections have biases
    expected = model(prompt).logits[0]
    assert not keeps_numbers(model, weights)
    light = with_packed_weights(model, weights, torch.float32)
    assert not any(x.dim() == 2 and x.dtype == torch.float32 for x in light.parameters())
    embedding, head = light.get_input_embeddings(), light.get_output_embeddings()
    assert embedding.packed is head.packed
    assert torch.equal(model(prompt).logits[0], expected)
    rounded = copy.deepcopy(model)
    for weight in rounded.parameters():
        if weight.dim() == 2 and weights == "int8":
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            weight.copy_((weight / scale).round() * scale)
        elif weight.dim() == 2:
            weight.copy_(weight.to(getattr(torch, weights)))
    assert weights == "int8" or keeps_numbers(rounded, weights)
    info = describe_package(light, CONFIG, prompt.shape[1], weights, kv="float16")
    assert (info.weights, info.dtype) == (weights, "float16")
    assert "dtype=float16" in info.model_hash
    assert info.model_hash != describe_package(model, CONFIG, 128, kv="float16").model_hash
    state = info.new_state()
    with enable(rounded, CONFIG):
        expected = rounded(prompt).logits[0, -1:]
    ours = export_model(light, info).module()(prompt, torch.tensor([prompt.shape[1] - 1]), *state)
    assert_close(ours, expected, 1e-2)


def test_an_embedding_of_a_subclass_stays_where_its_tied_head_is_packed(build, prompt):
    class Scaled(torch.nn.Embedding):
        def forward(self, token_ids):
            return super().forward(token_ids) * 2

    model = build("qwen2", tie_word_embeddings=True)
    model.model.embed_tokens.__class__ = Scaled
    expected = model(prompt).logits
    light = with_packed_weights(model, "float16", torch.float32)
    assert type(light.model.embed_tokens) is Scaled
    assert_close(light(prompt).logits, expected, 1e-2)


def test_weights_in_16_bits_are_packed_as_they_are(build, prompt):
    model = build("qwen2", tie_word_embeddings=True).to(torch.bfloat16)
    wide = copy.deepcopy(model).float()
    ours, theirs = (with_packed_weights(x, "bfloat16", torch.float32) for x in (model, wide))
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert torch.equal(ours(prompt).logits, theirs(prompt).logits)
    one, other = (describe_package(x, CONFIG, 128, kv="float16") for x in (model, wide))
    assert one.model_hash == other.model_hash
