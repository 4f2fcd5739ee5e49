"""Phase 2 against the oracle, and positions that it or the gathering of rows must refuse."""

from functools import partial

import pytest
import torch
from op_testing import DTYPES, Shape, compare_with_oracle, make_indices, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

check = partial(compare_with_oracle, ops.memory_attention, oracle.memory_attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
def test_agrees_with_the_oracle(device, dtype, heads, layout):
    shape = Shape(2, *heads, 45, 64, 48)
    check(*make_qkv(shape, dtype, device, layout, past=60), make_indices(shape, 105, 33, device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_of_latent_attention(device, dtype):
    shape = Shape(1, 2, 2, 45, 192, 128)
    check(
        *make_qkv(shape, dtype, device, "transposed", past=60), make_indices(shape, 105, 33, device)
    )


@pytest.mark.parametrize("size", [0, 1, 2, 31, 32, 33, 200])
def test_memory_sizes(device, size):
    shape = Shape(1, 4, 4, 20, 32, 32)
    check(*make_qkv(shape, device=device, past=10), make_indices(shape, 30, size, device))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([[[0, 9, -1]]], r"-1 or in \[0, 9\), got 9"),
        ([[[0, -1, 3]]], "-1 only"),
        ([[[-2]]], "got -2"),
    ],
)
def test_bad_positions_are_refused(indices, message):
    q, k, v = make_qkv(Shape(1, 2, 1, 4, 8, 8), past=5)
    with pytest.raises(ValueError, match=message):
        ops.memory_attention(q, k, v, torch.tensor(indices, dtype=torch.int32))


@pytest.mark.parametrize("position", [3, -2])
def test_gathering_refuses_positions_outside(position):
    with pytest.raises(ValueError, match=f"got {position}"):
        ops.gather_rows(torch.ones(1, 1, 3, 4), torch.tensor([[[position]]], dtype=torch.int32))
