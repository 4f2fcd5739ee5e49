"""A sample of transformers' classes: enabled equals stock, and dense calls have their reasons."""

import re

import pytest
import torch
import transformers
from compatibility.examine import HOLDS_ALL, PAGE, examine
from compatibility.tiny_model import build_tiny, model_classes, random_prompt

from h2o_prefill import enable

CLASSES = model_classes()
# What a version of transformers is known to have, and to build, is in the page.
IN_PAGE = f"transformers {transformers.__version__} (" in PAGE.read_text(encoding="utf-8")

# Class, changes of its config, sparse and all layers, part of the reason. What tests/python/hf has
# as well is left to the sweep of every class.
SAMPLE = [
    ("Exaone4ForCausalLM", {}, (1, 2), ""),
    ("Gemma4ForCausalLM", {}, (1, 2), ""),
    ("Qwen3NextForCausalLM", {}, (1, 1), ""),
    ("DiffLlamaForCausalLM", {}, (2, 2), "other values than the cached"),
    ("MllamaForConditionalGeneration", {}, None, ""),
    ("MistralForCausalLM", {"sliding_window": 512}, (2, 2), "keeps no state"),
    ("DeepseekV32ForCausalLM", {}, (0, 0), "chooses its keys itself"),
    ("BltForCausalLM", {}, None, "token ids are unknown"),
    ("BertLMHeadModel", {}, (0, 2), "attention is not causal"),
    ("BartForConditionalGeneration", {}, None, "encoder-decoder"),
    ("MambaForCausalLM", {}, (0, 0), "no attention layers"),
    ("BloomForCausalLM", {}, (0, 0), "does not use transformers' attention interface"),
]


def skip_unless_known(name):
    """Skip a class that the installed transformers lacks."""
    if name not in CLASSES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@pytest.mark.parametrize(("name", "changes", "layers", "reason"), SAMPLE)
def test_a_sample_of_classes(name, changes, layers, reason):
    skip_unless_known(name)
    finding = examine(name, **changes)
    assert finding.wrong == []
    if not IN_PAGE and finding.result in ("refused", "not run"):
        # Another version of transformers, in which this class cannot be made tiny, or enabled.
        pytest.skip(finding.reason)
    assert reason in finding.reason and bool(reason) == bool(finding.reason)
    assert layers in (None, (finding.sparse, finding.attention))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_right_and_in_the_table(name):
    finding = examine(name)
    if not IN_PAGE and "softcap" in finding.reason and finding.wrong:
        pytest.skip("sdpa of this transformers drops the soft cap, which is kept when enabled")
    assert finding.wrong == []
    if not IN_PAGE:
        pytest.skip("classes.md is of another version of transformers")
    [row] = re.findall(rf"^.*`{name}`.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert row.startswith(f"| {finding.row} |")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_last_queries_alone_in_the_last_layers(implementation):
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2}
    skip_unless_known("Gemma4ForCausalLM")
    tiny, prompt = build_tiny("Gemma4ForCausalLM", **changes), random_prompt(72)
    tiny.model.set_attn_implementation(implementation)
    stock = tiny(prompt, logits_to_keep=3).logits
    with enable(tiny.model, **HOLDS_ALL, dense_layers=(0, 1, 2, 3)):
        ours = tiny(prompt, logits_to_keep=3).logits
    torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)
