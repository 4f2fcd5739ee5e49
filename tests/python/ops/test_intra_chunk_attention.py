"""Phase 1 against the oracle: every dtype, layout and awkward length."""

from functools import partial

import pytest
import torch
from op_testing import DTYPES, Shape, compare_with_oracle, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

CHUNK = 32

check = partial(compare_with_oracle, ops.intra_chunk_attention, oracle.intra_chunk_attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
def test_agrees_with_the_oracle(device, dtype, heads, layout):
    check(*make_qkv(Shape(2, *heads, 77, 64, 64), dtype, device, layout), CHUNK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_of_latent_attention(device, dtype):
    check(*make_qkv(Shape(1, 2, 2, 77, 192, 128), dtype, device, "transposed"), CHUNK)


LENGTHS = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 128]


@pytest.mark.parametrize(
    ("sizes", "chunk_size"),
    [
        *((Shape(1, 4, 2, length, 16, 16), CHUNK) for length in LENGTHS),
        *((Shape(1, 2, 1, 70, dim, 264 - dim), 64) for dim in range(32, 257, 8)),
        *((Shape(1, 2, 2, 203, 24, 40), size) for size in (1, 7, 113, 300, 1 << 40)),
    ],
    ids=str,
)
def test_lengths_head_dims_and_chunk_sizes_that_fit_no_tile(device, sizes, chunk_size):
    check(*make_qkv(sizes, device=device), chunk_size)


def test_extreme_logits_stay_finite(device):
    q, k, v = make_qkv(Shape(1, 2, 2, 96, 16, 16), device=device)
    logits_scale = 100 / (q @ k.transpose(-1, -2)).abs().max().item()
    out, lse, colsum = check(q, k, v, CHUNK, scale=logits_scale)
    assert torch.isfinite(torch.cat([out.flatten(), lse.flatten(), colsum.flatten()])).all()


def test_a_nan_is_not_swallowed(device):
    q, k, v = make_qkv(Shape(1, 1, 1, 8, 8, 8), device=device)
    q[0, 0, 3, 0] = float("nan")
    out, _, _ = ops.intra_chunk_attention(q, k, v, 8)
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()
