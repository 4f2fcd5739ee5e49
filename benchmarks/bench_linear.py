"""Linear attention: the chunkwise operator against other forms of it, and against softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import hardware_peak, options
from common.allocator import keep_freed_memory
from common.linear_forms import (
    PackageMissing,
    cumulative_sums,
    flash_linear_attention,
    masked_square,
)
from common.memory import temporary_megabytes
from common.plan import Case, Lengths, Plan
from common.report import CASE_COLUMNS, Report, ratio_fields
from common.sdpa import sdpa
from common.timing import Timings, compare
from torch import Tensor

from h2o_prefill import ops

Attention = Callable[[], Tensor | tuple[Tensor, ...]]

COLUMNS = {
    **CASE_COLUMNS,
    "N": "{length}",
    "C": "{chunk_size}",
    "ms": "{milliseconds:.2f}",
    "% of peak": "{percent:.1f} ({percent_q1:.1f} to {percent_q3:.1f})",
    "MB": "{temporary_megabytes:.1f}",
    "backward": "{backward_ratio:.2f}x",
    "SDPA": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "backward too": "{both_speedup:.2f}x",
    "square": "{square_speedup:.2f}x",
    "cumsum": "{cumsum_speedup:.2f}x",
    "its MB": "{cumsum_megabytes:.0f}",
    "GB/s": "{gigabytes_per_second:.1f}",
    "fla": "{fla_speedup:.2f}x",
}
LENGTHS = Lengths(full=(256, 1024, 4096, 16384, 65536, 131072), quick=(1, 192))
DEFAULT_CHUNK_SIZE = 64
# Where the chunk size is swept: in rows that measure nothing else, so that they compare.
SWEPT_LENGTH = 4096
CHUNK_SIZES = (16, 32, 64, 128, 256)
# Forms that would take more memory than this are left out, and gradients of queries that take more
# in float32: they need some ten times that.
MOST_BYTES = 2**31
MOST_QUERY_BYTES = 2**30


@options.benchmark("linear", "dtype", "shape", "device", lengths=LENGTHS, seconds=20.0)
def main(plan: Plan) -> None:
    """Time chunkwise_linear_attention (elu+1, causal) and its gradient beside other attention.

    The others are torch SDPA; the masked square, which writes all products of queries and keys;
    the cumulative sums of all outer products of keys and values; and flash-linear-attention if it
    is installed, on a GPU by its kernels, elsewhere in its PyTorch form. At 4096 tokens the chunk
    size is swept. Flops are those that count: products of a query with the state and with the keys
    before it in its chunk, and those of a key and a value. "MB" is what a call holds at most beside
    its results, "backward" the time of the gradient by that of the call.
    """
    swept = (plan.lengths[-1], CHUNK_SIZES[:3]) if plan.quick else (SWEPT_LENGTH, CHUNK_SIZES)
    title = "chunkwise_linear_attention (elu+1, causal): speedup over SDPA and over other forms"
    kept = {"freed_memory_kept": keep_freed_memory()}
    with Report(plan, title, COLUMNS, lengths=plan.lengths, **kept) as report:
        _note_missing_package(report)
        for case in plan.cases():
            last: tuple[int, float] | None = None
            for length in plan.lengths:
                with_sdpa = plan.affords(length, last)
                row, taken = _row(case, length, DEFAULT_CHUNK_SIZE, plan.seconds, with_sdpa)
                report.add(**case.fields, **row)
                last = (length, taken) if taken and length >= 512 else last
                for chunk_size in swept[1] if length == swept[0] else ():
                    row, _ = _row(case, length, chunk_size, plan.seconds / 4, False)
                    report.add(**case.fields, **row, swept=True)


def _note_missing_package(report: Report) -> None:
    one = torch.zeros(1, 1, 64, 1)
    try:
        flash_linear_attention(one, one, one)
    except PackageMissing as missing:
        report.note(str(missing))


def _row(
    case: Case, length: int, chunk_size: int, seconds: float, with_others: bool
) -> tuple[dict[str, Any], float | None]:
    """Return a row, and the seconds that SDPA and its gradient took."""
    q, k, v = case.qkv(length)

    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.chunkwise_linear_attention(q, k, v, chunk_size=chunk_size)[0]

    calls: dict[str, Attention] = {"linear": lambda: linear(q, k, v)}
    if 4 * q.numel() <= MOST_QUERY_BYTES:
        calls["both"] = forward_and_backward(linear, q, k, v)
    if with_others:
        calls |= _others(case, q, k, v)
    peak, amount = _matmul_peak(q) if case.on_gpu else _fma_peak(case.threads)
    timings = compare({**calls, "peak": peak}, seconds, timer=case.timer)
    flops = _flops(case, length)
    share = timings.ratio("peak", "linear")
    percent = [100 * flops / amount * x for x in (share.value, share.q1, share.q3)]
    row = {
        "length": length,
        "chunk_size": chunk_size,
        "gflops": flops / timings.median("linear") / 1e9,
        "gigabytes_per_second": (2 * q.nbytes + k.nbytes + v.nbytes)
        / timings.median("linear")
        / 1e9,
        **dict(zip(("percent", "percent_q1", "percent_q3"), percent, strict=True)),
        "rounds": timings.rounds,
        **_times_and_memory(timings, calls, case.on_gpu),
    }
    if not with_others:
        return row, None
    return row, timings.median("sdpa") + timings.median("sdpa_both")


def _fma_peak(threads: int) -> tuple[Callable[[], object], float]:
    """Return a call that does nothing but multiply and add, and its flops."""
    peak = hardware_peak.fma(threads)
    return peak.run, peak.amount


def _matmul_peak(q: Tensor) -> tuple[Callable[[], object], float]:
    """Return a product of large matrices of the dtype and on the device of q, and its flops."""
    square = torch.randn(8192, 8192, device=q.device, dtype=q.dtype)
    return lambda: square @ square, 2.0 * square.shape[0] ** 3


def _others(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Attention]:
    """Return SDPA, its gradient, and the forms of linear attention that fit into memory."""
    heads, length = case.heads, q.shape[2]
    calls: dict[str, Attention] = {
        "sdpa": sdpa(q, k, v, causal=True),
        "sdpa_both": forward_and_backward(lambda *qkv: sdpa(*qkv, causal=True)(), q, k, v),
    }
    # Outer products and their sums; the product with the queries repeats these for every head.
    sums_bytes = 4 * (2 * heads.kv_heads + heads.query_heads) * length * heads.head_dim**2
    if 2 * 4 * heads.query_heads * length**2 <= MOST_BYTES:
        calls["square"] = lambda: masked_square(q, k, v)
    if sums_bytes <= MOST_BYTES:
        calls["cumsum"] = lambda: cumulative_sums(q, k, v)
    try:
        fla = flash_linear_attention(q, k, v)
    except PackageMissing:
        fla = None
    return calls if fla is None else {**calls, "fla": fla}


def _flops(case: Case, length: int) -> int:
    """Count those of chunks of the default size: kernels choose their own."""
    heads = case.heads
    per_query = 2 * heads.head_dim * (heads.head_dim + min(DEFAULT_CHUNK_SIZE, length) + 1)
    return length * (heads.query_heads * per_query + heads.kv_heads * 2 * heads.head_dim**2)


def _times_and_memory(
    timings: Timings, calls: dict[str, Attention], on_gpu: bool
) -> dict[str, Any]:
    """Return milliseconds and temporary megabytes of every call, and the ratios of their times."""
    fields: dict[str, Any] = {}
    for name, call in calls.items():
        prefix = "" if name == "linear" else f"{name}_"
        fields[f"{prefix}milliseconds"] = 1e3 * timings.median(name)
        memory = "temporary_megabytes" if name == "linear" else f"{name}_megabytes"
        fields[memory] = temporary_megabytes(call, on_gpu)
    if "both" in calls:
        fields["backward_ratio"] = timings.ratio("both", "linear").value - 1
    if "sdpa" in calls:
        fields |= ratio_fields("speedup", timings.ratio("sdpa", "linear"))
    if {"both", "sdpa_both"} <= set(calls):
        fields["both_speedup"] = timings.ratio("sdpa_both", "both").value
    for name in ("square", "cumsum", "fla"):
        if name in calls:
            fields[f"{name}_speedup"] = timings.ratio(name, "linear").value
    return fields


def forward_and_backward(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Attention:
    """Return a call of attention and of its gradient."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def call() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return torch.autograd.grad(out, inputs, out.detach())

    return call


app = options.command(main)

if __name__ == "__main__":
    app()
