"""Fusion of partial results."""

import pytest
import torch
from op_testing import DTYPES, Shape, assert_close_to_reference, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

SHAPE = Shape(2, 4, 2, 37, 32, 24)


def two_parts(dtype, device):
    """Attention over two disjoint halves of the keys, and over both at once."""
    q, k, v = make_qkv(SHAPE, torch.float64, device, past=43)
    order = torch.arange(80, dtype=torch.int32, device=device).expand(2, 2, 80)
    out_a, lse_a, _ = oracle.memory_attention(q, k, v, order[..., :33])
    out_b, lse_b, _ = oracle.memory_attention(q, k, v, order[..., 33:])
    out, lse, _ = oracle.memory_attention(q, k, v, order)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    parts = out_a.to(dtype), lse_a.to(lse_dtype), out_b.to(dtype), lse_b.to(lse_dtype)
    return parts, (out, lse)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_equals_one_softmax_over_both_key_sets(device, dtype):
    parts, (out, lse) = two_parts(dtype, device)
    actual = ops.merge_states(*parts)
    assert_close_to_reference(actual[0], out, oracle.merge_states(*parts)[0], "out")
    assert_close_to_reference(actual[1], lse, None, "lse")


MERGES = pytest.mark.parametrize("merge", [ops.merge_states, oracle.merge_states])


@MERGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_side_contributes_nothing(device, dtype, merge):
    (out_a, lse_a, out_b, _), _ = two_parts(dtype, device)
    empty = torch.full_like(lse_a, float("-inf"))
    poison = torch.full_like(out_b, float("nan"))
    for merged in (
        merge(out_a, lse_a, poison, empty),
        merge(poison, empty, out_a, lse_a),
    ):
        torch.testing.assert_close(merged[0], out_a, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged[1], lse_a, rtol=0, atol=1e-6)
    out, lse = merge(poison, empty, poison, empty)
    assert (out == 0).all() and (lse == float("-inf")).all()


@MERGES
def test_distant_logits_do_not_overflow(device, merge):
    (out_a, lse_a, out_b, lse_b), _ = two_parts(torch.float32, device)
    out, lse = merge(out_a, lse_a + 1e4, out_b, lse_b - 1e4)
    torch.testing.assert_close(out, out_a)
    torch.testing.assert_close(lse, lse_a + 1e4)


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "column"])
def test_layouts(device, layout):
    out_a, out_b, _ = make_qkv(Shape(1, 3, 3, 10, 8, 8), device=device, layout=layout)
    lse = torch.randn(1, 3, 10, device=device)
    actual = ops.merge_states(out_a, lse, out_b, lse.flip(2))
    expected = oracle.merge_states(
        out_a.double(), lse.double(), out_b.double(), lse.flip(2).double()
    )
    for a, e in zip(actual, expected, strict=True):
        assert_close_to_reference(a, e)
