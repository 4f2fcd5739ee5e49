"""Fusion of partial results. That it equals one softmax over both key sets is tested in C++."""

import pytest
import torch
from op_testing import DTYPES, Shape, compare_with_oracle, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle


def two_parts(dtype, device, layout="transposed"):
    """Return random outputs and lse of attention to two disjoint sets of keys."""
    out_a, out_b, _ = make_qkv(Shape(2, 4, 4, 37, 24, 24), dtype, device, layout)
    lse = torch.randn(2, 4, 37, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return out_a, lse, out_b, lse.flip(2)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
def test_agrees_with_the_oracle(device, dtype, layout):
    compare_with_oracle(ops.merge_states, oracle.merge_states, *two_parts(dtype, device, layout))


MERGES = pytest.mark.parametrize("merge", [ops.merge_states, oracle.merge_states])


@MERGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_side_contributes_nothing(device, dtype, merge):
    out_a, lse_a, out_b, _ = two_parts(dtype, device)
    empty = torch.full_like(lse_a, float("-inf"))
    poison = torch.full_like(out_b, float("nan"))
    for merged in (merge(out_a, lse_a, poison, empty), merge(poison, empty, out_a, lse_a)):
        torch.testing.assert_close(merged[0], out_a, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged[1], lse_a, rtol=0, atol=1e-6)
    out, lse = merge(poison, empty, poison, empty)
    assert (out == 0).all() and (lse == float("-inf")).all()


@MERGES
def test_distant_logits_do_not_overflow(device, merge):
    out_a, lse_a, out_b, lse_b = two_parts(torch.float32, device)
    out, lse = merge(out_a, lse_a + 1e4, out_b, lse_b - 1e4)
    torch.testing.assert_close(out, out_a)
    torch.testing.assert_close(lse, lse_a + 1e4)
