"""Copying of selected rows."""

import pytest
import torch
from op_testing import DTYPES, Shape, make_indices, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
def test_copies_exactly(device, dtype, layout):
    shape = Shape(2, 4, 4, 50, 24, 24)
    _, x, _ = make_qkv(shape, dtype, device, layout)
    indices = make_indices(shape, 50, 17, device)
    assert torch.equal(ops.gather_rows(x, indices), oracle.gather_rows(x, indices))


def test_absent_rows_are_zero_wherever_they_stand(device):
    x = torch.ones(1, 1, 3, 4, device=device)
    indices = torch.tensor([[[-1, 2, -1, 0]]], dtype=torch.int32, device=device)
    assert ops.gather_rows(x, indices).sum(-1).tolist() == [[[0, 4, 0, 4]]]


@pytest.mark.parametrize(("length", "size"), [(5, 0), (0, 3)])
def test_empty(device, length, size):
    x = torch.randn(2, 2, length, 8, device=device)
    indices = torch.full((2, 2, size), -1, dtype=torch.int32, device=device)
    assert torch.equal(ops.gather_rows(x, indices), torch.zeros(2, 2, size, 8, device=device))


@pytest.mark.parametrize("position", [3, -2])
def test_positions_outside_are_refused(position):
    with pytest.raises(ValueError, match=f"got {position}"):
        ops.gather_rows(torch.ones(1, 1, 3, 4), torch.tensor([[[position]]], dtype=torch.int32))
