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


@pytest.mark.parametrize("position", [3, -2])
def test_positions_outside_are_refused(position):
    with pytest.raises(ValueError, match=f"got {position}"):
        ops.gather_rows(torch.ones(1, 1, 3, 4), torch.tensor([[[position]]], dtype=torch.int32))
