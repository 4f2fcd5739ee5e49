"""Dense attention against the oracle: few rows and many, one step of the kernel and several."""

from functools import partial

import pytest
import torch
from op_testing import DTYPES, Shape, assert_same_on_threads, compare_with_oracle, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

STEP = 1024  # rows and keys of a step of the CPU kernel

check = partial(compare_with_oracle, ops.dense_attention, oracle.dense_attention)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
@pytest.mark.parametrize("rows", [1, 77])
def test_agrees_with_the_oracle(device, dtype, heads, layout, rows):
    check(*make_qkv(Shape(2, *heads, rows, 64, 48), dtype, device, layout, past=60))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 77])
def test_head_dims_of_latent_attention(device, dtype, rows):
    check(*make_qkv(Shape(1, 2, 2, rows, 192, 128), dtype, device, "transposed", past=60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "past"),
    [
        *(
            (rows, end - rows)
            for end in (STEP, STEP + 1, 2 * STEP + 1, 5000)
            for rows in (1, 3, 100)
        ),
        *((rows, past) for rows in (STEP - 1, STEP, STEP + 1) for past in (0, 700)),
    ],
)
def test_histories_and_calls_of_several_steps(device, dtype, rows, past):
    check(*make_qkv(Shape(1, 2, 1, rows, 32, 24), dtype, device, past=past))


# From the row counts that PyTorch takes over to those of the packed kernels, in every dtype.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("rows", [2, 7, 8, 15, 16, 63, 64])
def test_row_counts(device, dtype, heads, rows):
    check(*make_qkv(Shape(1, *heads, rows, 40, 72), dtype, device, past=150))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [0.9, 0.0, -0.5])
@pytest.mark.parametrize(("rows", "past"), [(1, 20), (3, 0), (3, 20), (100, 0), (100, 20)])
def test_scale_is_used(device, dtype, scale, rows, past):
    check(*make_qkv(Shape(1, 4, 2, rows, 32, 32), dtype, device, past=past), scale)


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (0, 100), (2, 0)])
def test_without_rows(device, batch, rows):
    q, k, v = make_qkv(Shape(batch, 4, 2, rows, 16, 24), device=device, past=9)
    assert ops.dense_attention(q, k, v).shape == (batch, 4, rows, 24)


@pytest.mark.parametrize("rows", [3, 100])
def test_a_nan_in_a_key_reaches_the_rows_that_see_it(device, rows):
    q, k, v = make_qkv(Shape(1, 2, 1, rows, 16, 16), device=device, past=1500)
    assert ops.dense_attention(q, k, v).isfinite().all()
    k[0, 0, 1501, 3] = float("nan")
    assert ops.dense_attention(q, k, v)[:, :, 1:].isnan().all()


@pytest.mark.parametrize("rows", [1, 1500])
def test_the_number_of_threads_changes_nothing(rows):
    q, k, v = make_qkv(Shape(1, 4, 2, rows, 32, 32), torch.bfloat16, past=2500)
    assert_same_on_threads(lambda: [ops.dense_attention(q, k, v)], (1, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_reaches_its_tile_alone(device, dtype, value):
    """As far as docs/method.md says."""
    before, after = {"cpu": (31, 63), "cuda": (127, 127)}[device]
    at, window = 777, 40
    q, k, v = make_qkv(Shape(1, 2, 1, 1000, 64, 64), dtype, device)
    v[0, 0, at, 3] = value
    seeing = torch.arange(1000, device=device) >= at
    for out, last in (
        (ops.dense_attention(q, k, v), 999),
        (ops.intra_chunk_attention(q, k, v, 1000)[0], 999),
        (ops.sliding_window_attention(q, k, v, window)[0], at + window - 1),
    ):
        finite = out.isfinite().all(-1).all(1)[0]
        assert finite[: at - before].all() and finite[last + 1 + after :].all()
        assert not finite[seeing][: last + 1 - at].any()
