"""Which operator computes a layer: windows and chunks, and dense calls that would be sdpa's."""

import warnings

import pytest
from hf_helpers import (
    EXACT,
    SPARSE,
    assert_close,
    in_calls,
    is_off,
    new_cache,
    sparse_rows,
    watch,
)
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_prefill import enable

TOKENS = 40
CUT = 12  # a window that hides keys of every call of these tests but decoded tokens of few
HALF = {"layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}

# The field of the window, and others that it needs; layers with a window.
MODELS = {
    "mistral": ("sliding_window", {}, 2),
    "phi3-window": ("sliding_window", {}, 2),
    "qwen2": ("sliding_window", {"use_sliding_window": True, **HALF}, 1),
    "gemma3": ("sliding_window", ROPES, 1),
    "gpt-oss": ("sliding_window", {}, 1),
    "llama4": ("attention_chunk_size", {}, 1),
}


@pytest.fixture
def prompt(make_ids):
    return make_ids(1, TOKENS)


@pytest.fixture
def dense_calls(monkeypatch):
    """Return a list that gets (queries, keys) of every layer that our operator computes densely."""
    return watch(monkeypatch, "dense_attention", lambda q, k, *_: (q.shape[2], k.shape[2]))


@pytest.fixture
def window_calls(monkeypatch):
    """Return a list that gets queries, keys and window of each layer that the operator computes."""
    note = lambda q, k, _v, window, *_: (q.shape[2], k.shape[2], window)  # noqa: E731
    return watch(monkeypatch, "sliding_window_attention", note)


def windowed(build, name, window):
    field, more, _ = MODELS[name]
    return build(name, **{field: window}, **more)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", [TOKENS - 1, TOKENS])
def test_one_token_more_than_the_window_and_a_second_call_are_as_stock_there(
    build, prompt, name, window
):
    """A cache of a layer whose window held all so far keeps no state for a second call."""
    model, windows = windowed(build, name, window), MODELS[name][2]
    stock, said, rows = model(prompt).logits, [], []
    for lengths in [(TOKENS,), (20, 20)]:
        with warnings.catch_warnings(record=True) as caught, enable(model, **EXACT):
            warnings.simplefilter("always")
            assert_close(in_calls(model, new_cache(model), prompt, lengths), stock)
            rows.append(sum(sparse_rows(model)))
        said.append(" ".join(str(w.message) for w in caught))
    assert rows[0] == TOKENS * (2 if window == TOKENS else 2 - windows)
    assert rows[1] == 20 * (2 + 2 - windows)
    assert ("prompt does not fit into" in said[0]) == (window < TOKENS and windows == 2)
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


@pytest.mark.parametrize("kind", ["ours", "static"])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_only_rows_that_see_different_first_keys_need_the_operator_of_windows(
    build, prompt, window_calls, name, kind
):
    model = windowed(build, name, CUT)
    warnings.filterwarnings("ignore", message="h2o_prefill: .*(no layer of|sliding window)")
    cache = new_cache(model) if kind == "ours" else StaticCache(model.config, max_cache_len=90)
    with enable(model, **{**EXACT, "min_prefill": 64}):
        in_calls(model, cache, prompt, (CUT, 20, 1, 7))
    sizes = [(new, CUT - 1 + new, CUT) for new in (20, 7)]
    assert window_calls == [size for size in sizes for _ in range(MODELS[name][2])]


def test_plain_causal_calls_are_our_dense_operators(llama, make_ids, dense_calls):
    """One chunk, a decoded token, a short call: each after the one before."""
    ids = make_ids(1, 25)
    stock = llama(ids).logits
    assert dense_calls == []
    with enable(llama, **SPARSE):
        ours = in_calls(llama, new_cache(llama), ids, (14, 1, 10))
    assert dense_calls == [(14, 14)] * 2 + [(1, 15)] * 2 + [(10, 25)] * 2
    assert_close(ours, stock)


def test_a_layer_that_is_not_causal_stays_the_models(llama, make_ids, dense_calls):
    ids = make_ids(2, 15)
    # In one layer alone, because all layers being non-causal is what `enable` warns of.
    llama.model.layers[0].self_attn.is_causal = False
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        assert_close(llama(ids).logits, stock)
    assert dense_calls == [(15, 15)]


@pytest.mark.parametrize("name", ["sdpa", "another"])
def test_an_attention_function_of_the_user_is_called(llama, make_ids, dense_calls, name):
    """Also one registered under the name sdpa."""
    seen, stock = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(module, query, *args, **kwargs):
        seen.append(query.shape[2])
        return stock(module, query, *args, **kwargs)

    llama.config._attn_implementation_internal = name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, mine)
        with enable(llama, **SPARSE):
            llama(make_ids(1, 15))
    assert seen == [15, 15] and dense_calls == []
