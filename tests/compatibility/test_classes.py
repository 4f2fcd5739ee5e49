"""Tiny models of many classes: enabled equals stock, and dense calls have their reasons."""

import re

import pytest
import torch
import transformers
from compatibility.examine import examine
from compatibility.page import PAGE, layers_text, reason_text
from compatibility.tiny_model import build_tiny, model_classes, random_prompt
from hf_helpers import sparse_layers  # noqa: F401

from h2o_prefill import enable

SPARSE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4, "min_prefill": None}
CLASSES = model_classes()
# What a version of transformers is known to have, and to build, is in the page.
IN_PAGE = f"transformers {transformers.__version__} (" in PAGE.read_text(encoding="utf-8")

# Class, changes of its config, sparse and all layers, part of the reason. What
# tests/python/hf/test_matrix.py has, or another class here, is left to the sweep of every class.
SAMPLE = [
    ("Exaone4ForCausalLM", {}, "1 / 2", ""),
    ("Gemma3ForConditionalGeneration", {}, "1 / 2", ""),
    ("Gemma3ForConditionalGeneration", {"text_config__sliding_window": 512}, "2 / 2", "sliding"),
    ("Gemma4ForCausalLM", {}, "1 / 2", ""),
    ("Qwen3NextForCausalLM", {}, "1 / 1", ""),
    ("DiffLlamaForCausalLM", {}, "2 / 2", "other values than it caches"),
    ("MllamaForConditionalGeneration", {}, None, ""),
    ("MistralForCausalLM", {}, "0 / 2", "the prompt does not fit into"),
    ("MistralForCausalLM", {"sliding_window": 512}, "2 / 2", "goes on in sliding"),
    ("DeepseekV32ForCausalLM", {}, "0 / 2", "keys that the model chooses itself"),
    ("BltForCausalLM", {}, None, "token ids are unknown"),
    ("DeepseekV4ForCausalLM", {"sliding_window": 512}, "0 / 3", "to compressed keys"),
    ("BertLMHeadModel", {}, "0 / 2", "attention is not causal"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "0 / 2", "is not causal"),
    ("BartForConditionalGeneration", {}, "0 / 6", "encoder-decoder"),
    ("MambaForCausalLM", {}, "", "no attention layers"),
    ("GitForCausalLM", {}, "", "do not use transformers' attention interface"),
    ("BloomForCausalLM", {}, "", "does not use transformers' attention interface"),
]


def skip_unless_known(name):
    """Skip a class that the installed transformers lacks."""
    if name not in CLASSES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@pytest.mark.parametrize(("name", "changes", "layers", "reason"), SAMPLE)
def test_a_sample_of_classes(name, changes, layers, reason, sparse_layers):  # noqa: F811
    skip_unless_known(name)
    finding = examine(name, CLASSES[name], **changes)
    assert finding.wrong == []
    if not IN_PAGE and finding.result in ("refused", "not run"):
        # Another version of transformers, in which this class cannot be made tiny, or enabled.
        pytest.skip(finding.reason)
    assert reason in finding.reason and bool(reason) == bool(finding.reason)
    assert layers is None or layers_text(finding) == layers
    # Where the prompt does not fit into the windows, a first part of it may.
    assert bool(sparse_layers) == (finding.sparse > 0) or "does not fit into" in finding.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CLASSES))
def test_every_class_is_right_and_in_the_table(name):
    finding = examine(name, CLASSES[name])
    if not IN_PAGE and "softcap" in finding.reason and finding.wrong:
        pytest.skip("sdpa of this transformers drops the soft cap, which is kept when enabled")
    assert finding.wrong == []
    if not IN_PAGE:
        pytest.skip("classes.md is of another version of transformers")
    text = PAGE.read_text(encoding="utf-8")
    [row] = re.findall(rf"^.*`{name}`.*$", text, re.MULTILINE)
    assert row.startswith(f"| {reason_text(finding)} |")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_blocks_that_a_model_chooses_itself(implementation):
    name = "MiniMaxM3VLForCausalLM"
    skip_unless_known(name)
    tiny = build_tiny(name, layer_types=["minimax_m3_sparse", "full_attention"])
    tiny.model.set_attn_implementation(implementation)
    prompt = random_prompt(72)
    stock = tiny(prompt).logits
    with enable(tiny.model, chunk_size=16, local_window=40, heavy_budget=40, min_prefill=None):
        ours = tiny(prompt).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_model_that_lets_only_the_last_queries_through_its_last_layers(kept):
    skip_unless_known("Gemma4ForCausalLM")
    tiny = build_tiny(
        "Gemma4ForCausalLM",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    )
    prompt = random_prompt(72)
    stock = tiny(prompt, logits_to_keep=kept).logits
    with enable(tiny.model, **SPARSE, dense_layers=(0, 1, 2, 3)):
        ours = tiny(prompt, logits_to_keep=kept).logits
    torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)
