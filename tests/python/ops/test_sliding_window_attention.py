"""Attention in a sliding window against the oracle, and PyTorch's attention under its mask."""

from functools import partial

import pytest
import torch
from op_testing import DTYPES, Shape, assert_same_on_threads, compare_with_oracle, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

STEP = 1024  # rows and keys of a step of the CPU kernel

check = partial(compare_with_oracle, ops.sliding_window_attention, oracle.sliding_window_attention)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
@pytest.mark.parametrize("rows", [1, 77])
def test_agrees_with_the_oracle(device, dtype, heads, layout, rows):
    check(*make_qkv(Shape(2, *heads, rows, 64, 48), dtype, device, layout, past=60), 45)


# Shorter than a vector of keys, at its end, at that of a panel and of a block of rows, longer than
# the history. A panel has up to 32 keys, of which single words and pairs are told apart.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 150, 299, 300, 301, 2**62])
def test_windows(device, dtype, window):
    check(*make_qkv(Shape(1, 2, 1, 230, 16, 24), dtype, device, past=70), window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [100, STEP, STEP + 1, 2 * STEP + 1, 4000])
@pytest.mark.parametrize(("rows", "past"), [(STEP + 70, 3000), (3, 5000), (2 * STEP + 1, 0)])
def test_windows_of_several_steps(device, dtype, window, rows, past):
    check(*make_qkv(Shape(1, 2, 1, rows, 16, 24), dtype, device, past=past), window)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("sinks", [None, (-2.0, 0.0, 2.0, 9.0)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [9, 3000])
def test_sinks_softcap_and_scale(device, dtype, sinks, softcap, window):
    """Sinks count once, and in lse."""
    q, k, v = make_qkv(Shape(1, 4, 2, 90, 16, 24), dtype, device, past=2500)
    logits = None if sinks is None else torch.tensor(sinks, device=device)
    check(q, k, v, window, scale=-0.4, sinks=logits, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_end_of_the_history_suffices(device, dtype):
    """As a cache that keeps the window alone holds it; what lies before is never read."""
    q, k, v = make_qkv(Shape(1, 2, 1, 200, 16, 16), dtype, device, past=1300)
    kept = slice(1300 - 99, None)
    whole = ops.sliding_window_attention(q, k, v, 100)
    ends = ops.sliding_window_attention(q, k[:, :, kept], v[:, :, kept], 100)
    for x, y in zip(ends, whole, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
    k[:, :, : kept.start], v[:, :, : kept.start] = float("nan"), float("nan")
    assert ops.sliding_window_attention(q, k, v, 100)[0].isfinite().all()


@pytest.mark.parametrize("rows", [1, 1500])
def test_the_number_of_threads_changes_nothing(rows):
    q, k, v = make_qkv(Shape(1, 4, 2, rows, 32, 32), torch.bfloat16, past=2500)
    assert_same_on_threads(lambda: ops.sliding_window_attention(q, k, v, 1300), (1, 2, 3))


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (2, 0)])
def test_without_rows(device, batch, rows):
    q, k, v = make_qkv(Shape(batch, 4, 2, rows, 16, 24), device=device, past=9)
    out, lse = ops.sliding_window_attention(q, k, v, 4)
    assert out.shape == (batch, 4, rows, 24) and lse.shape == (batch, 4, rows)


def test_wrong_arguments(device):
    q, k, v = make_qkv(Shape(1, 2, 1, 9, 16, 16), device=device)
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        ops.sliding_window_attention(q, k, v, 0)
    with pytest.raises(ValueError, match="the call's 9 tokens, got length 8"):
        ops.sliding_window_attention(q, k[:, :, :8], v[:, :, :8], 4)


SETTINGS = "h2o,chunk_size=16,local_window=4,heavy_budget=4,min_prefill=2"
CALLS = (40, 30, 1, 9, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [30, 55])
def test_calls_in_place(device, dtype, window):
    """Exact from the first call on that the window does not hold; sparse before, as without it."""
    q, k, v = make_qkv(Shape(1, 4, 2, sum(CALLS), 16, 24), dtype, device)
    buffers = [torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k[..., 0]).contiguous()]
    buffers.append(torch.full((1, 2, 8), -1, dtype=torch.int32, device=device))
    position, begin = torch.zeros(2, dtype=torch.int64), 0
    for rows in CALLS:
        end = begin + rows
        new = [x[:, :, begin:end] for x in (q, k, v)]
        place = (*buffers, position, None, None, None, 0, SETTINGS)
        out = ops.prefill_attention_(*new, *place, window=window)
        if end <= window:
            args = (*new, None, None, None, None, None, 0, SETTINGS)
            expected = ops.chunked_sparse_attention(*args)[0]
        else:
            expected, _ = ops.sliding_window_attention(new[0], k[:, :, :end], v[:, :, :end], window)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert buffers[2][..., begin:end].any() == (end <= window)
        ops.advance_position_(position, rows, SETTINGS)
        begin = end
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        ops.prefill_attention_(*new, *place, window=0)
