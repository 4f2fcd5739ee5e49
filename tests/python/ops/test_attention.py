"""Operators of attention against the oracle: dense, in a window, in chunks, over a memory set."""

import pytest
import torch
from op_testing import (
    DTYPES,
    HEADS_AND_LAYOUTS,
    Shape,
    assert_same_on_threads,
    compare_with_oracle,
    make_indices,
    make_qkv,
)

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

CHUNK = 32
STEP = 1024  # rows and keys of a step of the CPU kernel
# Earlier tokens, and what follows query, key and value.
OPERATORS = {
    "dense_attention": (60, lambda shape, device: ()),
    "sliding_window_attention": (60, lambda shape, device: (45,)),
    "intra_chunk_attention": (0, lambda shape, device: (CHUNK,)),
    "memory_attention": (60, lambda s, device: (make_indices(s, s.length + 60, 33, device),)),
}


def check(name, *arguments, **options):
    return compare_with_oracle(getattr(ops, name), getattr(oracle, name), *arguments, **options)


def check_shape(name, shape, dtype, device, layout="transposed"):
    past, more = OPERATORS[name]
    check(name, *make_qkv(shape, dtype, device, layout, past=past), *more(shape, device))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("heads", "layout"), HEADS_AND_LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [1, 77])
@pytest.mark.parametrize("name", OPERATORS)
def test_agrees_with_the_oracle(device, name, rows, heads, layout, dtype):
    check_shape(name, Shape(2, *heads, rows, 64, 48), dtype, device, layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 77])
@pytest.mark.parametrize("name", OPERATORS)
def test_head_dims_of_latent_attention(device, name, rows, dtype):
    check_shape(name, Shape(1, 2, 2, rows, 192, 128), dtype, device)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_without_rows_or_batch(device, name, batch):
    check_shape(name, Shape(batch, 4, 2, 0 if batch else 5, 16, 24), torch.float32, device)


@pytest.mark.parametrize("window", [None, 1300])
@pytest.mark.parametrize("rows", [1, 1500])
def test_the_number_of_threads_changes_nothing(rows, window):
    qkv = make_qkv(Shape(1, 4, 2, rows, 32, 32), torch.bfloat16, past=2500)

    def run():
        return ops.sliding_window_attention(*qkv, window) if window else [ops.dense_attention(*qkv)]

    assert_same_on_threads(run, (1, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_a_row_does_not_depend_on_the_rows_after_it(device, dtype, head_dim):
    """To the bit, whatever part of a tile they fill."""
    q, k, v = make_qkv(Shape(1, 2, 1, 200, head_dim, head_dim), dtype, device)
    whole = ops.intra_chunk_attention(q, k, v, 200)[:2]
    for rows in range(160, 200):
        part = ops.intra_chunk_attention(*(x[:, :, :rows] for x in (q, k, v)), 200)
        assert all(torch.equal(x, y[:, :, :rows]) for x, y in zip(part, whole, strict=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "past"),
    [
        *((rows, end - rows) for end in (STEP + 1, 2 * STEP + 1, 5000) for rows in (1, 3, 100)),
        *((rows, past) for rows in (STEP - 1, STEP, STEP + 1) for past in (0, 700)),
    ],
)
def test_histories_and_calls_of_several_steps(device, dtype, rows, past):
    check("dense_attention", *make_qkv(Shape(1, 2, 1, rows, 32, 24), dtype, device, past=past))


@pytest.mark.parametrize("rows", [3, 100])
def test_a_nan_in_a_key_reaches_the_rows_that_see_it(device, rows):
    q, k, v = make_qkv(Shape(1, 2, 1, rows, 16, 16), device=device, past=1500)
    assert ops.dense_attention(q, k, v).isfinite().all()
    k[0, 0, 1501, 3] = float("nan")
    assert ops.dense_attention(q, k, v)[:, :, 1:].isnan().all()


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


@pytest.mark.parametrize("window", [100, STEP, STEP + 1, 2 * STEP + 1, 4000])
@pytest.mark.parametrize(("rows", "past"), [(STEP + 70, 1100), (3, 5000), (2 * STEP + 1, 0)])
def test_windows_of_several_steps(device, window, rows, past):
    dtype = torch.bfloat16 if (window + rows) % 2 else torch.float32
    qkv = make_qkv(Shape(1, 2, 1, rows, 16, 24), dtype, device, past=past)
    check("sliding_window_attention", *qkv, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_end_of_the_history_suffices_for_a_window(device, dtype):
    """As a cache that keeps the window alone holds it; earlier rows are never read."""
    q, k, v = make_qkv(Shape(1, 2, 1, 200, 16, 16), dtype, device, past=1300)
    kept = slice(1300 - 99, None)
    whole = ops.sliding_window_attention(q, k, v, 100)
    ends = ops.sliding_window_attention(q, k[:, :, kept], v[:, :, kept], 100)
    for x, y in zip(ends, whole, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
    k[:, :, : kept.start], v[:, :, : kept.start] = float("nan"), float("nan")
    assert ops.sliding_window_attention(q, k, v, 100)[0].isfinite().all()


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
    check("intra_chunk_attention", *make_qkv(sizes, device=device), chunk_size)


def test_extreme_logits_stay_finite(device):
    q, k, v = make_qkv(Shape(1, 2, 2, 96, 16, 16), device=device)
    scale = 100 / (q @ k.transpose(-1, -2)).abs().max().item()
    for x in check("intra_chunk_attention", q, k, v, CHUNK, scale=scale):
        assert x.isfinite().all()


def test_a_nan_is_not_swallowed(device):
    q, k, v = make_qkv(Shape(1, 1, 1, 8, 8, 8), device=device)
    q[0, 0, 3, 0] = float("nan")
    out, _, _ = ops.intra_chunk_attention(q, k, v, 8)
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def over(*positions):
    qkv = make_qkv(Shape(1, 2, 1, 4, 8, 8), past=5)
    return lambda: ops.memory_attention(*qkv, torch.tensor([[positions]], dtype=torch.int32))


def accumulate(scores, colsum):
    memory = torch.tensor([[[1, 2]] * 2], dtype=torch.int32)
    return lambda: ops.accumulate_scores_(scores, memory, colsum)


SCORES = torch.ones(1, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (over(0, -1, 3), "-1 only"),
        (accumulate(SCORES, SCORES[..., 6:]), "colsum must not share memory with scores"),
        (accumulate(SCORES[:, :1].expand(1, 2, 8), SCORES[..., :2].clone()), "an address of its"),
    ],
)
def test_wrong_arguments(call, message):
    """What generated calls do not break: tests/random_calls/broken.py."""
    with pytest.raises(ValueError, match=message):
        call()
    assert (SCORES == 1).all()


def two_parts(dtype, device, layout="transposed"):
    """Return random outputs and lse of attention to two disjoint sets of keys."""
    out_a, out_b, _ = make_qkv(Shape(2, 4, 4, 37, 24, 24), dtype, device, layout)
    lse = torch.randn(2, 4, 37, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return out_a, lse, out_b, lse.flip(2)


@pytest.mark.parametrize("merge", [ops.merge_states, oracle.merge_states])
def test_merging_an_empty_side_and_distant_logits(device, merge):
    out_a, lse_a, out_b, lse_b = two_parts(torch.float32, device)
    empty = torch.full_like(lse_a, float("-inf"))
    poison = torch.full_like(out_b, float("nan"))
    for merged in (merge(out_a, lse_a, poison, empty), merge(poison, empty, out_a, lse_a)):
        torch.testing.assert_close(merged, (out_a, lse_a), rtol=0, atol=1e-6)
    out, lse = merge(poison, empty, poison, empty)
    assert (out == 0).all() and (lse == float("-inf")).all()
    far = merge(out_a, lse_a + 1e4, out_b, lse_b - 1e4)
    torch.testing.assert_close(far, (out_a, lse_a + 1e4))
