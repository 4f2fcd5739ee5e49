"""Linear attention: the chunkwise operator against other forms of it, and against softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _options as options
import _peak
import torch
from _memory import first_call_peak_bytes
from _report import Report, ratio_fields
from _sdpa import fastest, gpu_attention, sdpa
from _shapes import Heads
from _timing import Timings, compare
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.eval.peak_memory import peak_bytes

COLUMNS = {
    "model": "{model}",
    "D": "{head_dim}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "device": "{device}",
    "N": "{length}",
    "C": "{chunk_size}",
    "ms": "{milliseconds:.2f}",
    "% of FMA peak": "{percent:.1f} ({percent_q1:.1f} to {percent_q3:.1f})",
    "temporary MB": "{temporary_megabytes:.1f}",
    "backward / forward": "{backward_ratio:.2f}",
    "SDPA": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "masked square": "{square_speedup:.2f}x",
    "cumulative sums": "{cumsum_speedup:.2f}x",
    "its MB": "{cumsum_megabytes:.0f}",
    "TFLOP/s": "{teraflops:.1f}",
    "% of matmul peak": "{matmul_percent:.1f}",
    "GB/s": "{gigabytes_per_second:.0f}",
    "SDPA by": "{sdpa_backend}",
}
LENGTHS = [256, 1024, 4096, 16384, 65536, 131072]
# Forms that would take more memory than this are left out.
MOST_BYTES = 2**30


def main(
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: options.DtypeOption = None,
    shape: options.ShapeOption = None,
    lengths: options.LengthsOption = None,
    seconds: options.SecondsOption = 20.0,
    quick: options.QuickOption = False,
    device: options.DeviceOption = "cpu",
) -> None:
    """Time chunkwise_linear_attention (elu+1, causal) beside torch SDPA and two other forms.

    The others are the masked square, which writes all products of queries and keys, and the
    cumulative sums of all outer products of keys and values. At 4096 tokens the chunk size is
    swept. Flops are those that count: products of a query with the state and with the keys before
    it in its chunk, and those of a key and a value. On a GPU the rows have SDPA by its fastest
    backend, a matrix product of 8192 rows and columns as the peak, and the bytes a second of q, k,
    v and the result, each counted once.
    """
    plan = options.make_plan("linear", json, threads, dtype, shape, seconds, quick, device)
    chosen = plan.numbers("--lengths", lengths, LENGTHS, [1, 64, 200])
    title = "chunkwise_linear_attention (elu+1, causal): speedup over SDPA and over other forms"
    with Report(plan, title, COLUMNS, lengths=chosen) as report:
        for case in plan.cases():
            last: tuple[int, float] | None = None
            for length in chosen:
                with_sdpa = plan.affords(length, last)
                if plan.on_gpu:
                    row, taken = _gpu_row(case, length, plan.seconds, with_sdpa)
                else:
                    row, taken = _row(case, length, 64, plan.seconds, with_sdpa)
                report.add(**case.fields, **row)
                last = (length, taken) if taken and length >= 512 else last
                # Kernels for GPUs have their own chunks.
                swept = (16, 32, 128, 256) if length == 4096 and not plan.on_gpu else ()
                for chunk_size in swept:
                    row, _ = _row(case, length, chunk_size, plan.seconds / 4, False)
                    report.add(**case.fields, **row)


def _row(
    case: options.Case, length: int, chunk_size: int, seconds: float, with_sdpa: bool
) -> tuple[dict[str, Any], float | None]:
    """Return a row, and the seconds that SDPA took."""
    q, k, v = case.qkv(length)
    heads = case.heads

    def linear() -> Tensor:
        return ops.chunkwise_linear_attention(q, k, v, chunk_size=chunk_size)[0]

    calls: dict[str, Callable[[], object]] = {
        "linear": linear,
        "both": forward_and_backward(q, k, v, chunk_size),
    }
    if with_sdpa:
        calls["sdpa"] = sdpa(q, k, v, causal=True)
    # Outer products and their sums; the product with the queries repeats these for every head.
    sums_bytes = 4 * (2 * heads.kv_heads + heads.query_heads) * length * heads.head_dim**2
    if with_sdpa and 2 * 4 * heads.query_heads * length**2 <= MOST_BYTES:
        calls["square"] = lambda: masked_square(q, k, v)
    if with_sdpa and sums_bytes <= MOST_BYTES:
        calls["cumsum"] = lambda: cumulative_sums(q, k, v)
    peak = _peak.fma(case.threads)
    timings = compare({**calls, "peak": peak.run}, seconds)
    flops = _flops(heads, length, chunk_size)
    share = timings.ratio("peak", "linear")
    percent = [100 * flops / peak.amount * x for x in (share.value, share.q1, share.q3)]
    row = {
        "length": length,
        "chunk_size": chunk_size,
        "milliseconds": 1e3 * timings.median("linear"),
        "gflops": flops / timings.median("linear") / 1e9,
        **dict(zip(("percent", "percent_q1", "percent_q3"), percent, strict=True)),
        "temporary_megabytes": (first_call_peak_bytes(linear) - linear().nbytes) / 1e6,
        "backward_ratio": timings.ratio("both", "linear").value - 1,
        "rounds": timings.rounds,
        **_speedups(timings, calls),
    }
    if "cumsum" in calls:
        row["cumsum_megabytes"] = peak_bytes(calls["cumsum"]) / 1e6
    return row, timings.median("sdpa") if with_sdpa else None


def _gpu_row(
    case: options.Case, length: int, seconds: float, with_sdpa: bool
) -> tuple[dict[str, Any], float | None]:
    """Return a row, and the seconds that all backends of SDPA took together."""
    q, k, v = case.qkv(length)
    square = torch.randn(8192, 8192, device=case.device, dtype=case.dtype)
    baselines = gpu_attention(q, k, v, causal=True) if with_sdpa else {}
    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: ops.chunkwise_linear_attention(q, k, v)[0],
        "both": forward_and_backward(q, k, v, 64),
        "matmul": lambda: square @ square,
        **baselines,
    }
    timings = compare(calls, seconds, timer=case.timer)
    taken = timings.median("linear")
    flops = _flops(case.heads, length, 64)
    share = timings.ratio("matmul", "linear").value
    row = {
        "length": length,
        "chunk_size": 64,
        "milliseconds": 1e3 * taken,
        "teraflops": flops / taken / 1e12,
        "matmul_percent": 100 * flops / (2 * square.shape[0] ** 3) * share,
        "gigabytes_per_second": (2 * q.nbytes + k.nbytes + v.nbytes) / taken / 1e9,
        "backward_ratio": timings.ratio("both", "linear").value - 1,
        "rounds": timings.rounds,
    }
    if not baselines:
        return row, None
    best = fastest(timings, list(baselines))
    row |= {"sdpa_backend": best, **ratio_fields("speedup", timings.ratio(best, "linear"))}
    return row, sum(timings.median(name) for name in baselines)


def _flops(heads: Heads, length: int, chunk_size: int) -> int:
    per_query = 2 * heads.head_dim * (heads.head_dim + min(chunk_size, length) + 1)
    return length * (heads.query_heads * per_query + heads.kv_heads * 2 * heads.head_dim**2)


def _speedups(timings: Timings, calls: dict[str, Callable[[], object]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "sdpa" in calls:
        fields |= ratio_fields("speedup", timings.ratio("sdpa", "linear"))
    for name in ("square", "cumsum"):
        if name in calls:
            fields[f"{name}_speedup"] = timings.ratio(name, "linear").value
    return fields


def forward_and_backward(q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> Callable[[], object]:
    """Return a call of the operator and of its gradient."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def call() -> object:
        out, _, _ = ops.chunkwise_linear_attention(*inputs, chunk_size=chunk_size)
        return torch.autograd.grad(out, inputs, out)

    return call


def masked_square(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend linearly by all products of queries and keys, those above the diagonal left out."""
    queries, keys, values = _features(q, k, v)
    return ((queries @ keys.transpose(-1, -2)).tril() @ values).flatten(1, 2)


def cumulative_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend linearly by the sums of k^T v up to every token, all kept at once."""
    queries, keys, values = _features(q, k, v)
    states = (keys.unsqueeze(-1) * values.unsqueeze(-2)).cumsum(3)
    return (queries.unsqueeze(-2) @ states).squeeze(-2).flatten(1, 2)


def _features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """elu+1 of q [B, Hkv, G, T, D] and k [B, Hkv, 1, T, D], and v beside them."""
    elu = torch.nn.functional.elu
    queries = (elu(q) + 1).unflatten(1, (k.shape[1], -1))
    return queries, (elu(k) + 1).unsqueeze(2), v.unsqueeze(2)


app = options.command(main)

if __name__ == "__main__":
    app()
