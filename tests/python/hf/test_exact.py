"""The preset `exact`: dense attention by our kernels, and what it says."""

from __future__ import annotations

import warnings

import pytest
from hf_helpers import assert_close, in_calls, new_cache, watch
from test_padding import Batch

from h2o_prefill import PrefillConfig, enable, explain

EXACT = PrefillConfig(chunk_size=16, exact=True)
# Of grouped heads, latents, caps, sinks, and layers with a window.
MODELS = ["llama", "gpt2", "deepseek-v3", "gemma2", "gpt-oss", "gemma3", "mistral-window"]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture
def by_our_kernel(monkeypatch):
    """Return a list that gets the queries of each call of our operator."""
    return watch(monkeypatch, "dense_attention", lambda q, *_: q.shape[2])


@pytest.mark.parametrize("name", MODELS)
def test_equals_stock_and_warns_of_nothing(build, make_ids, by_our_kernel, name):
    model, ids = build(name), make_ids(1, 72)
    stock = model(ids).logits
    assert by_our_kernel == []
    with enable(model, EXACT, strict=True):
        assert_close(model(ids).logits, stock)
        assert_close(in_calls(model, new_cache(model), ids, (40, 1, 31)), stock)
    assert 72 in by_our_kernel or name == "mistral-window"  # whose every layer has a window


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_are_what_they_are_alone(build, make_ids, by_our_kernel, name, side):
    model = build(name)
    batch = Batch([make_ids(1, n, seed=n) for n in (40, 23, 40)], side)
    alone = [model(row).logits[0] for row in batch.rows]
    with enable(model, EXACT):
        out = model(**batch.arguments).logits
    for ours, expected in zip(batch.cut(out), alone, strict=True):
        assert_close(ours, expected)
    assert set(by_our_kernel) == {40, 23}


def test_what_explain_says(llama, ids, sparse_layers):
    with enable(llama, EXACT):
        llama(ids)
        rows = explain(llama).layers
    assert {(row.mode, row.reason) for row in rows} == {("dense", "exact")}
    assert all(row.dense_rows == ids.shape[1] for row in rows)
    assert sparse_layers == []
