"""Sliding windows and attention chunks: full attention if they hold the whole prompt, else exact.

A layer whose window hides some keys goes through operators that never see a mask.
"""

import warnings

import pytest
import torch
from hf_helpers import (
    EXACT,
    GREEDY,
    SPARSE,
    assert_close,
    assert_close_under_autocast,
    in_calls,
    is_off,
    new_cache,
    watch,
)
from transformers import StaticCache

from h2o_prefill import enable
from h2o_prefill.hf import masks

TOKENS = 40
HALF = {"layer_types": ["sliding_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention"] * 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}

# The field of the window, and others that it needs; fields without one; layers with a window.
MODELS = {
    "mistral": ("sliding_window", {}, {"sliding_window": None}, 2),
    "phi3-window": ("sliding_window", {}, {"sliding_window": None}, 2),
    "qwen2": ("sliding_window", {"use_sliding_window": True, **HALF}, {}, 1),
    "gemma3": ("sliding_window", ROPES, {**ROPES, **FULL}, 1),
    "llama4": ("attention_chunk_size", {}, {"attention_chunk_size": 512}, 1),
}


EVERY_MODEL = [(name, implementation) for name in MODELS for implementation in ("sdpa", "eager")]
every_model = pytest.mark.parametrize(("name", "implementation"), EVERY_MODEL)


@pytest.fixture
def prompt(make_ids):
    return make_ids(1, TOKENS)


def windowed(build, name, window, implementation=None):
    setting, more = MODELS[name][:2]
    return build(name, implementation, **{setting: window}, **more)


@every_model
def test_a_prompt_that_fits_the_window_is_sparse(
    build, prompt, sparse_layers, name, implementation
):
    unlimited = build(name, implementation, **MODELS[name][2])
    with enable(unlimited, **SPARSE):
        expected = unlimited(prompt).logits
    sparse_layers.clear()
    model = windowed(build, name, TOKENS, implementation)
    with enable(model, strict=True, **SPARSE):
        for cache in (None, new_cache(model)):
            ours = model(prompt, past_key_values=cache).logits
            assert_close(ours, expected)
        ours = model(prompt, use_cache=False).logits
        assert_close(ours, expected)
    assert sparse_layers == [TOKENS] * 6


@every_model
@pytest.mark.parametrize("window", [TOKENS - 1, TOKENS])
def test_one_token_more_than_the_window_and_a_second_call_are_as_stock_there(
    build, prompt, sparse_layers, name, implementation, window
):
    """A cache of a layer whose window held all so far keeps no state for a second call."""
    model, full = windowed(build, name, window, implementation), 2 - MODELS[name][3]
    stock, calls, said = model(prompt).logits, [(TOKENS,), (20, 20)], []
    for lengths in calls:
        with warnings.catch_warnings(record=True) as caught, enable(model, **EXACT):
            warnings.simplefilter("always")
            assert_close(in_calls(model, new_cache(model), prompt, lengths), stock)
        said.append(" ".join(str(w.message) for w in caught))
    assert sparse_layers == [TOKENS] * (2 if window == TOKENS else full) + [20] * (2 + full)
    assert ("prompt does not fit into" in said[0]) == (window < TOKENS and full == 0)
    assert ("sliding or chunked layers" in said[1]) == (window == TOKENS)


@pytest.mark.parametrize("name", ["mistral", "phi3"])
@pytest.mark.parametrize(("window", "least"), [(16, 1), (40, 41)])
def test_a_window_that_no_sparse_call_fits_is_told_of(build, name, window, least):
    model, settings = build(name, sliding_window=window), {**SPARSE, "min_prefill": least}
    with pytest.warns(UserWarning, match="no layer of .* can be sparse: its attention is sliding"):
        handle = enable(model, **settings)
    assert {layer.reason for layer in handle.report()} == {"sliding attention, exact"}
    handle.disable()
    with pytest.raises(NotImplementedError, match="no layer of"):
        enable(model, strict=True, **settings)
    assert is_off(model)
    enable(build(name, sliding_window=window + 1), **settings)


CUT = 12  # a window that hides keys of every call of these tests but decoded tokens of few


@pytest.fixture
def window_calls(monkeypatch):
    """Return a list that gets queries, keys and window of each layer that the operator computes."""
    note = lambda q, k, _v, window, *_: (q.shape[2], k.shape[2], window)  # noqa: E731
    return watch(monkeypatch, "sliding_window_attention", note)


def without_masks(monkeypatch):
    """Let the making of any mask fail."""

    def refuse(**arguments):
        raise AssertionError(f"a mask of {arguments['q_length']} x {arguments['kv_length']}")

    monkeypatch.setattr(masks, "_previous_mask_function", lambda *_: refuse)


def test_only_rows_that_see_different_first_keys_need_the_operator_of_windows(
    build, prompt, window_calls
):
    model = windowed(build, "gemma3", CUT)
    with enable(model, **EXACT):
        in_calls(model, new_cache(model), prompt, (CUT, 20, 1, 7))
    kept = CUT - 1
    assert window_calls == [(20, kept + 20, CUT), (7, kept + 7, CUT)]


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_static_cache_needs_no_mask_of_a_window(build, prompt, window_calls, name):
    """test_matrix.py compares what every model computes and generates with one."""
    model = windowed(build, name, CUT)
    stock, cache = model(prompt).logits, StaticCache(config=model.config, max_cache_len=90)
    warnings.filterwarnings("ignore", message="h2o_prefill: no layer of")
    with enable(model, **{**EXACT, "min_prefill": 64}):
        assert_close(in_calls(model, cache, prompt, (20, 1, 14, 5)), stock)
    sizes = [(20, 20, CUT), (14, 25, CUT), (5, 16, CUT)]
    assert window_calls == [size for size in sizes for _ in range(MODELS[name][3])]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_rows_of_a_padded_batch_that_the_window_cuts(build, make_ids, monkeypatch, name, side):
    model = windowed(build, name, CUT) if name in MODELS else build(name, sliding_window=CUT)
    warnings.filterwarnings("ignore", message="h2o_prefill: .* hides tokens")
    batch, tokens = make_ids(2, TOKENS), slice(7, None) if side == "left" else slice(None, -7)
    mask = torch.zeros_like(batch)
    mask[0], mask[1, tokens] = 1, 1
    stock = model(batch, attention_mask=mask).logits
    text = model.generate(batch, attention_mask=mask, **GREEDY)
    with enable(model, **EXACT):
        ours = model(batch, attention_mask=mask).logits
        if side == "left":
            assert torch.equal(model.generate(batch, attention_mask=mask, **GREEDY), text)
        without_masks(monkeypatch)
        assert_close(model(batch, attention_mask=mask).logits, ours)
    assert_close(ours[mask.bool()], stock[mask.bool()])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: {"output_attentions": True},
        lambda model: model.train() and {},
        lambda model: torch.set_grad_enabled(True) and {},
    ],
    ids=["output_attentions", "dropout", "gradients"],
)
def test_calls_that_the_operator_does_not_take_get_their_mask(build, prompt, window_calls, change):
    model = build("gemma3", "eager", **ROPES, sliding_window=CUT, attention_dropout=1e-9)
    arguments = change(model) or {}
    stock = model(prompt, **arguments).logits
    with warnings.catch_warnings(), enable(model, **EXACT):
        warnings.filterwarnings("ignore", message="h2o_prefill: ")
        assert_close(model(prompt, **arguments).logits, stock)
    assert window_calls == []


def test_windows_under_autocast(build, prompt, window_calls):
    model = build("gemma3", "sdpa", **ROPES, sliding_window=CUT)
    assert_close_under_autocast(model, prompt, **EXACT)
    assert window_calls
