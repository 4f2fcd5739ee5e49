"""Families of models, kinds of caches, and calls: with room stock's results, else the oracle's."""

import warnings

import pytest
import torch
from hf_helpers import (
    EVERYTHING,
    EXACT,
    GREEDY,
    H2O,
    RECALL,
    RECOMMENDED,
    SPARSE,
    WIDENING,
    assert_close,
    assert_same_state,
    in_calls,
    new_cache,
)
from transformers import DynamicCache, StaticCache

from h2o_prefill import enable
from h2o_prefill.hf import masks

# Layers of two that go sparse: the others have a window that is shorter than the prompt.
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "gpt2", "mistral", "phi3", "deepseek-v3"), 2),
    **dict.fromkeys(("gemma2", "gemma3", "gpt-oss", "llama4", "qwen2-window"), 1),
    **dict.fromkeys(("mistral-window", "phi3-window"), 0),
}
# What a call gets as its cache, and what `generate` gets.
CACHES = {
    "none": lambda model: None,
    "ours": new_cache,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "dynamic without config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=90),
}
# Shorter and longer than a chunk and a window, and single tokens.
CALLS = (20, 1, 14, 37)


def both_ways(family, implementation):
    """Whether transformers runs this family so: soft caps and sinks are eager alone."""
    return implementation == "eager" or family not in ("gemma2", "gpt-oss")


WAYS = ("sdpa", "eager")
ALL = [(x, how, kind) for x in FAMILIES for how in WAYS if both_ways(x, how) for kind in CACHES]


def points(families=FAMILIES, kinds=CACHES):
    """Return points of the matrix: each family with each cache, each way with either.

    What is the one way for one cache is the other for the next; the rest takes minutes.
    """
    marked = []
    for family, how, kind in ALL:
        place = list(FAMILIES).index(family) + list(CACHES).index(kind)
        first = how == WAYS[place % 2] or not both_ways(family, "sdpa")
        marks = () if first else pytest.mark.slow
        if family in families and kind in kinds:
            marked.append(pytest.param(family, how, kind, marks=marks))
    return pytest.mark.parametrize(("family", "implementation", "kind"), marked)


def generate(model, ids, kind, **more):
    cache = {} if kind == "none" else {"past_key_values": CACHES[kind](model)}
    return model.generate(ids, **cache, **more, **GREEDY)


@points()
def test_with_room_for_everything_it_is_stock(
    build, ids, sparse_layers, family, implementation, kind
):
    """In one call, in several, and generating; also with the preset `exact`."""
    model, sparse = build(family, implementation), FAMILIES[family]
    stock, text = model(ids).logits, generate(model, ids, "none")
    for settings in (EXACT, {"config": "exact", "chunk_size": 16}):
        sparse_layers.clear()
        with warnings.catch_warnings(), enable(model, **settings):
            warnings.filterwarnings("ignore", message="h2o_prefill: .* does not fit into")
            warnings.filterwarnings("ignore", message="h2o_prefill: .* sliding or chunked layers")
            if kind == "static" and model.config.model_type == "deepseek_v3":
                warnings.filterwarnings("ignore", message="h2o_prefill: .* keeps no state")
            assert_close(model(ids, past_key_values=CACHES[kind](model)).logits, stock)
            assert settings is not EXACT or sparse_layers == [72] * sparse
            assert torch.equal(generate(model, ids, kind), text)
            if kind == "none":
                assert_close(model(ids, use_cache=False).logits, stock)
                continue
            assert_close(in_calls(model, CACHES[kind](model), ids, CALLS), stock)
            assert torch.equal(generate(model, ids, kind, prefill_chunk_size=32), text)


@pytest.mark.parametrize("options", [H2O, RECOMMENDED, EVERYTHING], ids=["h2o", "recall", "all"])
@pytest.mark.parametrize("family", [x for x in FAMILIES if x != "llama4"])
def test_with_a_small_memory_it_is_the_oracle(build, prompt, logits_by_the_oracle, family, options):
    """Each layer by its kind: its settings, its window, its sinks, its soft cap."""
    changes = {"attn_logit_softcapping": 0.5} if family == "gemma2" else {}
    model, ids = build(family, "eager", **changes), prompt[:, :72]
    stock = model(ids).logits
    with warnings.catch_warnings(), enable(model, strict=FAMILIES[family] > 0, **options) as handle:
        warnings.filterwarnings("ignore", message="h2o_prefill: .* does not fit into")
        ours = model(ids, use_cache=False).logits
        assert_close(model(ids, past_key_values=new_cache(model)).logits, ours)
    assert_close(ours, logits_by_the_oracle(model, ids, handle.config))
    assert torch.allclose(ours[:, 16:], stock[:, 16:], atol=1e-3) == (FAMILIES[family] == 0)


@pytest.mark.parametrize("options", [SPARSE, {**RECALL, "sink_tokens": 2}], ids=["h2o", "recall"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt-oss", "deepseek-v3"])
def test_calls_in_multiples_of_the_chunk_equal_one_call(build, ids, family, options):
    model = build(family, "eager")
    with enable(model, strict=True, **{**options, "min_prefill": 2}):
        whole_cache = new_cache(model)
        whole = model(ids, past_key_values=whole_cache).logits
        for lengths in ((16, 56), (32, 16, 24), (16, 16, 16, 16, 8), (64, 8)):
            cache = new_cache(model)
            assert_close(in_calls(model, cache, ids, lengths), whole)
            for ours, expected in zip(cache.layers, whole_cache.layers, strict=True):
                if hasattr(expected, "state"):  # a layer that keeps all keys
                    assert_same_state(ours.state, expected.state)
            assert torch.equal(cache.token_ids, ids)


@points(["llama", "qwen3", "gemma3", "llama4"])
def test_any_cache_and_prefill_chunk_size_generate_the_same(
    build, ids, sparse_layers, family, implementation, kind
):
    model = build(family, implementation)
    with enable(model, strict=True, **{**SPARSE, **WIDENING, "min_prefill": 2}):
        whole, rows = generate(model, ids, "none"), 72 * FAMILIES[family]
        assert sum(sparse_layers) == rows
        for step in (None, 16, 32):
            sparse_layers.clear()
            assert torch.equal(generate(model, ids, kind, prefill_chunk_size=step), whole)
            # A window holds the first of several calls.
            assert sum(sparse_layers) == rows or (step and FAMILIES[family] == 1)
        if kind == "static":
            made = model.generate(ids, cache_implementation="static", **GREEDY)
            assert torch.equal(made, whole)


@points([x for x in FAMILIES if x != "llama4"], ["ours", "dynamic", "dynamic without config"])
def test_no_layer_whose_window_hides_keys_needs_a_mask(
    build, ids, monkeypatch, family, implementation, kind
):
    model = build(family, implementation)

    function_for = masks._previous_mask_function

    def without_windows(*model):
        def make(**arguments):
            assert arguments.get("local_size") is None
            return function_for(*model)(**arguments)

        return make

    calls, more = (30, 1, 25, 16), torch.cat([ids, ids], dim=1)[:, :89]
    stock = model(ids).logits
    expected = generate(model, more[:, :80], "none")
    warnings.filterwarnings("ignore", message="h2o_prefill: no layer of")
    with enable(model, **{**EXACT, "min_prefill": 1000}):
        monkeypatch.setattr(masks, "_previous_mask_function", without_windows)
        assert_close(in_calls(model, CACHES[kind](model), ids, calls), stock)
        assert torch.equal(generate(model, more[:, :80], kind), expected)
