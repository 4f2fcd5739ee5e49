"""A random model and a byte tokenizer, small enough for tests to build in a moment."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS = "<bos>"
SENTENCE = "Sphinx of black quartz, judge my vow. "


def make_tokenizer(add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte; token 0 is BOS, put in front if `add_bos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {BOS: 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, model_max_length=32
    )


def make_model(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Return a Llama of two layers for the tokenizer's 257 tokens."""
    settings = dict(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        # Large enough that attention, and so what is left out of it, changes the logits.
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def save_model(folder: Path) -> Path:
    """Save the model and the tokenizer, as `load_model` takes a folder."""
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_uneven_model(seed: int = 0) -> LlamaForCausalLM:
    """Return the model with half the query and KV heads in its second layer."""
    model = make_model(seed)
    attention = model.model.layers[1].self_attn
    smaller = copy.deepcopy(model.config)
    smaller.num_attention_heads, smaller.num_key_value_heads = 2, 1
    torch.manual_seed(seed + 1)
    uneven = type(attention)(smaller, layer_idx=1)
    for parameter in uneven.parameters():
        torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    # The config that tells which attention function to call is the model's.
    uneven.config = model.config
    model.model.layers[1].self_attn = uneven
    return model.eval()
