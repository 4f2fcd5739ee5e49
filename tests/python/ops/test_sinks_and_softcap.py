"""Attention sinks and soft-capped logits of the operators that prefill, against the oracle."""

from functools import partial

import pytest
import torch
from op_testing import DTYPES, Shape, compare_with_oracle, make_qkv

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

S = 32
NO_STATE = (None,) * 5
SETTINGS = f"h2o,chunk_size={S},local_window=8,heavy_budget=8,sink_tokens=2,min_prefill=2"
# Logits reach 4, so the cap of 1.5 has an effect.
CASES = ["sinks", "softcap", "both"]


def logit_options(case, heads, device="cpu"):
    sinks = torch.linspace(-2, 4, heads, device=device)
    return {
        "sinks": {"sinks": sinks},
        "softcap": {"softcap": 1.5},
        "both": {"sinks": sinks, "softcap": 1.5},
    }[case]


check = partial(compare_with_oracle, ops.chunked_sparse_attention, oracle.chunked_sparse_attention)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_agrees_with_the_oracle(device, dtype, case):
    q, k, v = make_qkv(Shape(2, 6, 2, 150, 32, 48), dtype, device)
    check(q, k, v, *NO_STATE, 0, SETTINGS, **logit_options(case, 6, device))


@pytest.mark.parametrize("sink", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_sinks_far_from_the_logits(device, dtype, sink, sink_dtype):
    """Sinks have any dtype and layout."""
    q, k, v = make_qkv(Shape(1, 4, 2, 100, 16, 16), dtype, device)
    sinks = torch.tensor([[sink, 9], [0, 9], [sink, 9], [1, 9]], device=device).to(sink_dtype)[:, 0]
    out, scores, *_ = check(q, k, v, *NO_STATE, 0, SETTINGS, sinks=sinks)
    assert out.isfinite().all() and scores.isfinite().all()
    assert out[:, 0].any() == (sink < 1e3)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_sink_of_minus_infinity_and_a_softcap_of_0_are_none(dtype):
    q, k, v = make_qkv(Shape(1, 4, 2, 100, 16, 16), dtype)
    sinks = torch.full((4,), -torch.inf)
    calls = [ops.chunked_sparse_attention, lambda *x, **y: (ops.dense_attention(*x[:3], **y),)]
    for call in calls[: 1 if dtype == torch.float64 else 2]:
        without = call(q, k, v, *NO_STATE, 0, SETTINGS)
        for x, y in zip(call(q, k, v, *NO_STATE, 0, SETTINGS, sinks=sinks), without, strict=True):
            assert torch.equal(x, y)


EXTREMES = [(1e-300, None), (1e-9, None), (1e6, None), (1e300, None), (2.0, 0.0), (1e300, 1e-30)]


@pytest.mark.parametrize(("softcap", "scale"), EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softcaps_far_from_the_logits(device, dtype, softcap, scale):
    """A tiny cap makes all weights equal, as a tiny scale does; a huge one has no effect."""
    q, k, v = make_qkv(Shape(1, 4, 2, 100, 16, 16), dtype, device)
    capped = ops.dense_attention(q, k, v, scale=scale, softcap=softcap)
    one = ops.dense_attention(q[:, :, -1:], k, v, scale=scale, softcap=softcap)
    torch.testing.assert_close(one, capped[:, :, -1:])
    if softcap > 1 and scale is None:
        expected = oracle.dense_attention(q.double(), k.double(), v.double())
    else:
        sums = v.double().repeat_interleave(2, dim=1).cumsum(2)
        expected = sums / torch.arange(1, 101, device=device).unsqueeze(-1)
    torch.testing.assert_close(capped.double(), expected, rtol=0, atol=1e-5)
    check(q, k, v, *NO_STATE, 0, SETTINGS, scale=scale, softcap=softcap)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("rows", "past"), [(1, 60), (77, 0), (5, 3000)])
def test_dense_attention(device, dtype, rows, past, case):
    """Of one pass of the kernel, and of several: a sink counts once."""
    q, k, v = make_qkv(Shape(2, 4, 2, rows, 32, 24), dtype, device, past=past)
    options = logit_options(case, 4, device)
    compare_with_oracle(ops.dense_attention, oracle.dense_attention, q, k, v, **options)
