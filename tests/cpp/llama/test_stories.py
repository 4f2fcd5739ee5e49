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
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("stories")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text_of(stories):
    content = (stories / "tok512.bin").read_bytes()
    pieces, at = [], 4
    while at < len(content):
        (length,) = struct.unpack("<i", content[at + 4 : at + 8])
        pieces.append(content[at + 8 : at + 8 + length])
        at += 8 + length
    return lambda ids: b"".join(pieces[id] for id in ids).decode().strip()


def test_it_tells_the_story(program, folder, text_of, file_of):
    result = program("llama", folder, file_of(torch.tensor([1])), "--max-new-tokens", 120)
    assert result.returncode == 0, result.stderr
    assert text_of(map(int, result.stdout.split())).startswith(STORY)


def test_logits_behind_the_story(program, model, folder, file_of, tmp_path):
    told = program("llama", folder, file_of(torch.tensor([1])), "--max-new-tokens", 400)
    ids = torch.tensor([1, *map(int, told.stdout.split())])
    assert len(ids) > 200
    settings = "h2o,chunk_size=64,local_window=16,heavy_budget=16,recall=2,recall_block=16"
    with torch.no_grad():
        dense = model(ids[None]).logits[0]
        with enable(model, settings, strict=True):
            sparse = model(ids[None]).logits[0]
    saved = tmp_path / "logits.pt"
    for expected, options in ((sparse, ("--settings", settings)), (dense, ("--dense",))):
        result = program("llama", folder, file_of(ids), "--save-logits", saved, *options)
        assert result.returncode == 0, result.stderr
        torch.testing.assert_close(torch.load(saved), expected, atol=1e-4, rtol=0)
