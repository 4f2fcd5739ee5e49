"""Families of models, kinds of caches, ways to call and settings; each test is one property."""

import copy
import warnings

import pytest
import torch
import transformers
from hf_helpers import (
    EVERYTHING,
    EXACT,
    GREEDY,
    H2O,
    PRESET_EXACT,
    RECALL,
    RECOMMENDED,
    SPARSE,
    WIDENING,
    assert_close,
    assert_same_states,
    hooked,
    in_calls,
    new_cache,
    sparse_rows,
    states,
    stock_copy,
)
from packaging.version import Version
from transformers import DynamicCache, StaticCache

from h2o_prefill import chunked_prefill, enable
from h2o_prefill.hf import masks

# Layers of two that go sparse: the others have a window that is shorter than the prompt.
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "gpt2", "mistral", "phi3", "deepseek-v3"), 2),
    **dict.fromkeys(("gemma2", "gemma3", "gpt-oss", "llama4", "qwen2-window"), 1),
    **dict.fromkeys(("mistral-window", "phi3-window"), 0),
}
# Layers with a recurrence beside their attention; latents, and keys wider than values.
RECURRENT = ("FalconH1ForCausalLM", "ZayaForCausalLM", "Zamba2ForCausalLM")
LATENT = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    *("MiniCPM3ForCausalLM", "LongcatFlashForCausalLM"),
)
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
    return model.generate(ids, **cache, **{**GREEDY, **more})


@points()
def test_with_room_for_everything_it_is_stock(build, ids, family, implementation, kind):
    """In one call, in several, and generating; also with the preset `exact`."""
    model, sparse = build(family, implementation), FAMILIES[family]
    stock, text = model(ids).logits, generate(model, ids, "none")
    beams = {"num_beams": 2, "num_return_sequences": 2}
    searched = generate(model, ids, "none", **beams)
    for settings in (EXACT, PRESET_EXACT):
        with warnings.catch_warnings(), enable(model, **settings):
            warnings.filterwarnings("ignore", message="h2o_prefill: .* does not fit into")
            warnings.filterwarnings("ignore", message="h2o_prefill: .* sliding or chunked layers")
            if kind == "static" and model.config.model_type == "deepseek_v3":
                warnings.filterwarnings("ignore", message="h2o_prefill: .* keeps no state")
            assert_close(model(ids, past_key_values=CACHES[kind](model)).logits, stock)
            assert settings is not EXACT or sum(sparse_rows(model)) == 72 * sparse
            assert torch.equal(generate(model, ids, kind), text)
            if kind != "static":
                assert torch.equal(generate(model, ids, kind, **beams), searched)
            if kind == "none":
                assert_close(model(ids, use_cache=False).logits, stock)
                continue
            assert_close(in_calls(model, CACHES[kind](model), ids, CALLS), stock)
            assert torch.equal(generate(model, ids, kind, prefill_chunk_size=32), text)


@pytest.mark.parametrize("options", [H2O, RECOMMENDED, EVERYTHING], ids=["h2o", "recall", "all"])
@pytest.mark.parametrize("family", [*(x for x in FAMILIES if x != "llama4"), *RECURRENT, *LATENT])
def test_with_a_small_memory_it_is_the_oracle(build, prompt, logits_by_the_oracle, family, options):
    """Each layer by its kind: its settings, its window, its sinks, its soft cap."""
    changes = {"attn_logit_softcapping": 0.5} if family == "gemma2" else {}
    model, ids = build(family, "eager" if family in FAMILIES else None, **changes), prompt[:, :72]
    sparse, tolerance = FAMILIES.get(family, 2), 1e-5
    if family not in FAMILIES:
        # Some rounding there is larger, and weights of nearly 1 are ties by their maximum.
        options, tolerance = {**options, "gqa_reduce": "sum"}, 1e-4
    stock = model(ids).logits
    with warnings.catch_warnings(), enable(model, strict=sparse > 0, **options) as handle:
        warnings.filterwarnings("ignore", message="h2o_prefill: .* does not fit into")
        ours = model(ids, use_cache=False).logits
        assert_close(model(ids, past_key_values=new_cache(model)).logits, ours, tolerance)
    assert_close(ours, logits_by_the_oracle(model, ids, handle.config), tolerance)
    moved = (ours - stock)[:, 16:].abs().amax() / stock.abs().amax().clamp(min=1)
    assert (moved > 1e-3) == (sparse > 0)


@pytest.mark.parametrize("options", [H2O, {**RECALL, "sink_tokens": 2}], ids=["h2o", "recall"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "gpt-oss", "deepseek-v3", *RECURRENT, *LATENT]
)
def test_calls_in_multiples_of_the_chunk_equal_one_call(build, ids, family, options):
    model = build(family, "eager" if family in FAMILIES else None)
    tolerance = 1e-5 if family in FAMILIES else 1e-4
    with enable(model, strict=True, **{**options, "min_prefill": 2}):
        whole_cache = new_cache(model)
        whole = model(ids, past_key_values=whole_cache).logits
        for lengths in ((16, 56), (32, 16, 24), (16, 16, 16, 16, 8), (64, 8)):
            cache = new_cache(model)
            assert_close(in_calls(model, cache, ids, lengths), whole, tolerance)
            assert_same_states(cache, whole_cache, tolerance)
            assert torch.equal(cache.token_ids, ids)
        for each in (1, 9):
            output = chunked_prefill(model, ids, chunks_per_call=each)
            assert_close(output.logits, whole[:, -1:], tolerance)
            assert_same_states(output.past_key_values, whole_cache, tolerance)


@points(["llama", "qwen3", "gemma3", "llama4"])
def test_any_cache_and_prefill_chunk_size_generate_the_same(
    build, ids, family, implementation, kind
):
    model, settings = build(family, implementation), {**SPARSE, **WIDENING, "min_prefill": 2}
    with enable(model, strict=True, **settings):
        whole, rows = generate(model, ids, "none"), 72 * FAMILIES[family]
        before = sum(sparse_rows(model))
        assert before == rows
        for step in (None, 16, 32):
            assert torch.equal(generate(model, ids, kind, prefill_chunk_size=step), whole)
            before, more = sum(sparse_rows(model)), sum(sparse_rows(model)) - before
            # A window holds the first of several calls.
            assert more == rows or (step and FAMILIES[family] == 1)
        if kind == "static":
            made = model.generate(ids, cache_implementation="static", **GREEDY)
            assert torch.equal(made, whole)


@pytest.mark.parametrize("kind", ["none", "ours"])
@pytest.mark.parametrize(("layers", "length"), [(1, 72), (2, 49)])
def test_assisted_decoding_of_a_sparse_prompt_equals_plain_decoding(
    build, make_ids, kind, layers, length
):
    # With as many layers the assistant is the model itself, and most candidates are accepted.
    model, assistant = build("llama"), build("llama", num_hidden_layers=layers)
    ids, texts, forwards = make_ids(1, length, length), [], []
    with enable(model, **RECALL), enable(assistant, **RECALL):
        for how in ({}, {"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            cache = {} if kind == "none" else {"past_key_values": new_cache(model)}
            options = {"max_new_tokens": 24, "do_sample": False, **cache, **how}
            forwards.append(0)
            with hooked(model, lambda *_: forwards.append(forwards.pop() + 1)):
                texts.append(model.generate(ids, **options))
            for used in cache.values():
                assert torch.equal(used.token_ids, texts[0][:, : used.get_seq_length()])
        caches = [new_cache(model) for _ in range(2)]
        model(ids, past_key_values=caches[0])
        candidates = torch.cat([ids, ids[:, :9]], dim=1)
        model(candidates, past_key_values=caches[1], logits_to_keep=10)
    caches[1].crop(-9)
    assert_same_states(*caches, 0)
    assert torch.equal(texts[1], texts[0]) and forwards[1] < (16 if layers == 2 else 25)
    assert torch.equal(texts[2], texts[0])


@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_decoding_sees_every_key_of_a_sparse_prompt(build, ids, implementation, dtype, tolerance):
    """The stock model decodes with the keys of the sparse prefill: the same logits."""
    model, token = build("llama", implementation).to(getattr(torch, dtype)), torch.tensor([[5]])
    with enable(model, strict=True, **SPARSE):
        cache = model(ids).past_key_values
        plain, before = stock_copy(cache, model.config), copy.deepcopy(states(cache))
        ours = model(token, past_key_values=cache).logits
        for one, other in zip(states(cache), before, strict=True):
            assert torch.equal(one.scores[..., :72], other.scores)
            assert torch.equal(one.memory, other.memory)
    assert_close(ours, model(token, past_key_values=plain).logits, tolerance)


@pytest.mark.parametrize("kind", ["ours", "dynamic", "static"])
def test_chat_turns_stay_sparse(llama, make_ids, kind):
    """A second long turn goes on from the first and from the tokens decoded between."""
    cache = StaticCache(llama.config, 150) if kind == "static" else CACHES[kind](llama)
    with enable(llama, strict=True, **EXACT):
        first = llama.generate(make_ids(1, 72), past_key_values=cache, **GREEDY)
        # The last generated token is not in the cache: the second turn begins with it.
        turn = torch.cat([first, make_ids(1, 40, seed=4)], dim=1)
        second = llama.generate(turn, past_key_values=cache, **GREEDY)
        assert sparse_rows(llama) == [72 + 41] * 2
        if kind != "static":  # A turn that is taken back leaves what was before it.
            cache.crop(first.shape[1] - 1 - cache.get_seq_length())
            again = llama.generate(turn, past_key_values=cache, **GREEDY)
            assert torch.equal(again, second)
    assert torch.equal(second, llama.generate(turn, **GREEDY))


@pytest.mark.parametrize("chunks", [None, 16])
@pytest.mark.parametrize("length", [40, 60, 72, 90, 100])
def test_a_prompt_begins_with_the_text_of_the_cache(llama, ids, make_ids, chunks, length):
    if chunks and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("`generate` goes on from no cache in chunks before transformers 5.23")
    text, other = torch.cat([ids, ids[:, :28]], dim=1), make_ids(1, 100, seed=5)
    with enable(llama, **SPARSE):
        cache = llama(ids).past_key_values

        def answer(prompt, **more):
            options = {**GREEDY, "prefill_chunk_size": chunks, **more}
            return llama.generate(prompt, past_key_values=copy.deepcopy(cache), **options)

        for prompt in (text, other) if length <= 72 else (other,):
            if length == 72 and chunks:
                continue  # `generate` takes this for what follows the cache.
            with pytest.raises(ValueError, match=r"^input_ids must begin with the 72 tokens of"):
                answer(prompt[:, :length])
        whole = torch.ones(1, 72 + length, dtype=torch.int64)
        rest = answer(other[:, :length], attention_mask=whole)
        if length > 72:
            assert answer(text[:, :length]).shape[1] == length + 8
            after = answer(torch.cat([ids, other[:, :length]], dim=1))
            assert torch.equal(after[:, -8:], rest[:, -8:])


@pytest.mark.parametrize("kind", ["ours", "dynamic", "dynamic without config"])
@pytest.mark.parametrize("family", [x for x in FAMILIES if x != "llama4" and both_ways(x, "sdpa")])
def test_no_layer_whose_window_hides_keys_needs_a_mask(build, ids, monkeypatch, family, kind):
    """Neither does any other of sdpa's."""
    model = build(family, "sdpa")

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
