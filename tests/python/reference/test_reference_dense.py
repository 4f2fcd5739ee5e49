"""The oracle of dense attention, against PyTorch and by what causality means."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill.reference import ops


def random_qkv(rows, history, heads=(4, 2)):
    torch.manual_seed(0)
    shapes = [(heads[0], rows, 8), (heads[1], history, 8), (heads[1], history, 6)]
    return [2 * torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_a_call_without_history_is_pytorchs_causal_attention(heads):
    q, k, v = random_qkv(20, 20, heads)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ops.dense_attention(q, k, v, 0.3), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_queries_are_the_last_rows_of_the_history(rows):
    q, k, v = random_qkv(20, 20)
    last = ops.dense_attention(q[:, :, 20 - rows :], k, v)
    torch.testing.assert_close(
        last, ops.dense_attention(q, k, v)[:, :, 20 - rows :], rtol=0, atol=1e-12
    )


def test_a_later_key_is_seen_by_nobody_before_it():
    q, k, v = random_qkv(9, 20)
    before = ops.dense_attention(q, k, v)
    k[:, :, 15], v[:, :, 15] = 5.0, -5.0
    changed = (ops.dense_attention(q, k, v) != before).any(-1).all(0).all(0)
    assert changed.tolist() == [False] * 4 + [True] * 5  # row i is position 11 + i
