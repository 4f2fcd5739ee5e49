"""Linear attention of few and of many tokens: the decoding step, digits, memory, page faults."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from h2o_prefill import ops
from h2o_prefill.eval.speed.peak_memory import peak_bytes
from h2o_prefill.reference import ops as oracle
from h2o_prefill.testing import DTYPES, Shape, assert_close_to_reference, make_qkv

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (12, 2), (9, 1)])
@pytest.mark.parametrize("length", [1, 2, 8, 9])
@pytest.mark.parametrize("goes_on", [False, True])
def test_few_tokens(device, dtype, heads, length, goes_on):
    """Token by token, and the first length that a chunk takes; dims that fill no vector."""
    q, k, v = make_qkv(Shape(2, *heads, length, 20, 77), dtype, device)
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    state = torch.randn(2, heads[1], 20, 77, dtype=wide_dtype, device=device)
    decay = -torch.rand(2, heads[1], length, dtype=wide_dtype, device=device)
    arguments = (q, k, v, decay, *((state, state.abs().sum(3)) if goes_on else ()))
    for normalize in (False, True):
        given = arguments if normalize else arguments[:5]
        actual = ops.chunkwise_linear_attention(*given, normalize=normalize)
        expected = oracle.chunkwise_linear_attention(*map(wide, given), normalize=normalize)
        peer = oracle.chunkwise_linear_attention(*given, normalize=normalize)
        for a, e, p in zip(actual, expected, peer, strict=True):
            assert_close_to_reference(a, e, p)


@pytest.mark.parametrize("value_dim", [64, 72])
def test_digits_of_16k_tokens(value_dim):
    """Of outputs that go past the caches, as whole lines or not."""
    q, k, v = make_qkv(Shape(1, 2, 1, 16384, 64, value_dim))
    actual = ops.chunkwise_linear_attention(q, k, v)
    expected = ops.chunkwise_linear_attention(q.double(), k.double(), v.double())
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert (a - e).norm() < 1e-5 * e.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_outputs_of_16_bits(dtype):
    q, k, v = make_qkv(Shape(1, 2, 1, 16384, 16, 160), dtype)
    actual = ops.chunkwise_linear_attention(q, k, v, normalize=True)[0]
    expected = ops.chunkwise_linear_attention(q.float(), k.float(), v.float(), normalize=True)[0]
    torch.testing.assert_close(actual, expected.to(dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_of_128k_tokens(threads):
    """At most 64 MiB beside inputs and outputs, in a thread that keeps nothing of earlier calls."""
    inputs = make_qkv(Shape(1, 2, 2, 131072, 64, 64))

    def peak():
        torch.set_num_threads(threads)
        return peak_bytes(lambda: ops.chunkwise_linear_attention(*inputs))

    with ThreadPoolExecutor(max_workers=1) as fresh_thread:
        held = fresh_thread.submit(peak).result()
    out_bytes = inputs[0].nbytes
    assert out_bytes < held < out_bytes + 2**26


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(encoding="ascii"),
    reason="the system has no huge pages",
)
def test_large_outputs_take_few_page_faults():
    resource = pytest.importorskip("resource")

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    torch.use_deterministic_algorithms(False)  # else they are filled before anything is advised
    q, k, v = make_qkv(Shape(1, 8, 1, 32768, 16, 64))
    before = faults()
    out, _, _ = ops.chunkwise_linear_attention(q, k, v)
    assert faults() - before < out.nbytes / 4096 / 2
