"""The preset `exact`: dense attention by our kernels, and what it says."""

from __future__ import annotations

import warnings

import pytest
from hf_helpers import assert_close, watch
from test_padding import Batch

from h2o_prefill import PrefillConfig, enable, explain

EXACT = PrefillConfig(chunk_size=16, exact=True)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture
def by_our_kernel(monkeypatch):
    """Return a list that gets the queries of each call of our operator."""
    return watch(monkeypatch, "dense_attention", lambda q, *_: q.shape[2])


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
