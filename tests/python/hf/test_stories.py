"""A trained model of another program: stories260K of llama2.c, and the story that it tells there.

H2O_PREFILL_STORIES names the folder with stories260K.bin and tok512.bin of
https://huggingface.co/karpathy/tinyllamas.
"""

import os
import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from h2o_prefill import enable

# What `run stories260K.bin -t 0.0` writes, by doc/stories260K.md of llama2.c.
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)

# What a checkpoint begins with, by the names of transformers.
HEADER = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.fixture(scope="module")
def stories():
    folder = os.environ.get("H2O_PREFILL_STORIES")
    if folder is None:
        pytest.skip("H2O_PREFILL_STORIES does not name the folder of stories260K.bin")
    return Path(folder)


@pytest.fixture(scope="module")
def model(stories):
    """The checkpoint as a model of transformers, which pairs the dimensions of RoPE differently."""
    content = (stories / "stories260K.bin").read_bytes()
    sizes = dict(zip(HEADER, struct.unpack("<7i", content[:28]), strict=True))
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=True)
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    head_dim = hidden // config.num_attention_heads

    def take(*shape):
        nonlocal numbers
        size = torch.Size(shape).numel()
        taken, numbers = numbers[:size].view(shape), numbers[size:]
        return taken

    def halves(weight, count):
        return weight.view(count, head_dim // 2, 2, hidden).transpose(1, 2).reshape(-1, hidden)

    kv_width = config.num_key_value_heads * head_dim
    weights = {"model.embed_tokens.weight": take(config.vocab_size, hidden)}
    for name, shape in (
        ("input_layernorm", (hidden,)),
        ("self_attn.q_proj", (hidden, hidden)),
        ("self_attn.k_proj", (kv_width, hidden)),
        ("self_attn.v_proj", (kv_width, hidden)),
        ("self_attn.o_proj", (hidden, hidden)),
        ("post_attention_layernorm", (hidden,)),
        ("mlp.gate_proj", (intermediate, hidden)),
        ("mlp.down_proj", (hidden, intermediate)),
        ("mlp.up_proj", (intermediate, hidden)),
    ):
        for layer, weight in enumerate(take(config.num_hidden_layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):
                weight = halves(weight, weight.shape[0] // head_dim)
            weights[f"model.layers.{layer}.{name}.weight"] = weight
    weights["model.norm.weight"] = take(hidden)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


@pytest.fixture(scope="module")
def text_of(stories):
    content = (stories / "tok512.bin").read_bytes()
    pieces, at = [], 4
    while at < len(content):
        (length,) = struct.unpack("<i", content[at + 4 : at + 8])
        pieces.append(content[at + 8 : at + 8 + length])
        at += 8 + length
    return lambda ids: b"".join(pieces[id] for id in ids).decode().strip()


@torch.no_grad()
def test_it_tells_the_story_and_sparse_prefill_with_room_for_it_is_dense(model, text_of):
    begin = torch.tensor([[1]])
    with enable(model, "exact", strict=True):
        story = model.generate(begin, attention_mask=begin, max_new_tokens=400, do_sample=False)
    told = story[0, 1:].tolist()
    assert len(told) > 200 and text_of(told).startswith(STORY)
    dense = model(story).logits
    with enable(model, "h2o,chunk_size=64,local_window=256,heavy_budget=256", strict=True):
        torch.testing.assert_close(model(story).logits, dense, atol=1e-4, rtol=0)
