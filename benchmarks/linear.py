"""Linear attention: the chunkwise operator against other forms of it, and against softmax."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import native
from common.attention import sdpa
from common.benchmark import Case, Plan, benchmark, new_app
from common.compare import Timings, compare
from common.machine import keep_freed_memory, temporary_megabytes
from common.report import Report, Row, speedup_fields
from torch import Tensor

from h2o_prefill import ops

app = new_app()

Attention = Callable[[], Tensor | tuple[Tensor, ...]]

LENGTHS = ((256, 1024, 4096, 16384, 65536, 131072), (1, 192))
DECODED = ((1, 2, 4, 8, 16), (1, 2))
DEFAULT_CHUNK_SIZE = 64
# Where the chunk size is swept: in rows that measure nothing else, so that they compare.
SWEPT_LENGTH = 4096
CHUNK_SIZES = (16, 32, 64, 128, 256)
# Forms that would take more memory than this are left out, and backward passes of queries that take
# more in float32: they need some ten times that.
MOST_BYTES = 2**31
MOST_QUERY_BYTES = 2**30


@benchmark(app, "linear", "dtype", "shape", lengths=LENGTHS, seconds=20.0)
def linear(plan: Plan) -> None:
    """Time chunkwise_linear_attention (elu+1, causal) and its backward beside other attention.

    The others are torch SDPA; the masked square, which writes all products of queries and keys;
    the cumulative sums of all outer products of keys and values; and flash-linear-attention if it
    is installed, in its PyTorch form. At 4096 tokens the chunk size is swept. Flops count the
    products of a query with the state and with the keys before it in its chunk, and the products
    of keys and values. "temporary MB" is the most that a call holds beside its results, "both" a
    call and its backward, "backward ratio" the backward alone.
    """
    swept = (plan.lengths[-1], CHUNK_SIZES[:3]) if plan.quick else (SWEPT_LENGTH, CHUNK_SIZES)
    title = "chunkwise_linear_attention (elu+1, causal): speedup over SDPA and over other forms"
    with Report(plan, title, lengths=plan.lengths, freed_memory_kept=keep_freed_memory()) as report:
        if find_fla() is None:
            report.note("flash-linear-attention is left out: pip install flash-linear-attention")
        for case in plan.cases():
            last: tuple[int, float] | None = None
            for length in plan.lengths:
                with_others = plan.affords(length, last)
                row, taken = _row(case, length, DEFAULT_CHUNK_SIZE, plan.seconds, with_others)
                report.add(**case.fields, **row)
                last = (length, taken) if taken and length >= 512 else last
                for chunk_size in swept[1] if length == swept[0] else ():
                    row, _ = _row(case, length, chunk_size, plan.seconds / 4, False)
                    report.add(**case.fields, **row, swept=True)


def _row(
    case: Case, length: int, chunk_size: int, seconds: float, with_others: bool
) -> tuple[Row, float | None]:
    """Return a row, and the seconds that SDPA and its backward took."""
    q, k, v = case.qkv(length)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.chunkwise_linear_attention(q, k, v, chunk_size=chunk_size)[0]

    calls: dict[str, Attention] = {"linear": partial(attend, q, k, v)}
    if 4 * q.numel() <= MOST_QUERY_BYTES:
        calls["both"] = forward_and_backward(attend, q, k, v)
    if with_others:
        calls |= _others(case, q, k, v)
    peak = native.peak("fma", case.threads)
    timings = case.compare({**calls, "peak": peak.run}, seconds)
    taken = timings.median("linear")
    flops = _flops(case, length)
    row = {
        "length": length,
        "chunk_size": chunk_size,
        "gflops": flops / taken / 1e9,
        "gigabytes_per_second": (2 * q.nbytes + k.nbytes + v.nbytes) / taken / 1e9,
        **timings.ratio("peak", "linear").fields("percent", 100 * flops / peak.amount),
        "rounds": timings.rounds,
        **_times_and_memory(timings, calls),
    }
    return row, timings.median("sdpa") + timings.median("sdpa_both") if with_others else None


def _others(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Attention]:
    """Return SDPA, its backward, and the forms of linear attention that fit into memory."""
    heads, length = case.heads, q.shape[2]
    calls: dict[str, Attention] = {
        "sdpa": sdpa(q, k, v, causal=True),
        "sdpa_both": forward_and_backward(lambda *qkv: sdpa(*qkv, causal=True)(), q, k, v),
    }
    # Outer products and their sums; the product with the queries repeats these for every head.
    sums_bytes = 4 * (2 * heads.kv_heads + heads.query_heads) * length * heads.head_dim**2
    if 2 * 4 * heads.query_heads * length**2 <= MOST_BYTES:
        calls["square"] = partial(masked_square, q, k, v)
    if sums_bytes <= MOST_BYTES:
        calls["cumsum"] = partial(cumulative_sums, q, k, v)
    fla = find_fla()
    # It takes whole chunks.
    if fla is not None and length % 64 == 0:
        calls["fla"] = flash_linear_attention(fla, q, k, v)
    return calls


def _flops(case: Case, length: int) -> int:
    """Count the operations of chunks of the default size: kernels choose their own."""
    heads = case.heads
    per_query = 2 * heads.head_dim * (heads.head_dim + min(DEFAULT_CHUNK_SIZE, length) + 1)
    return length * (heads.query_heads * per_query + heads.kv_heads * 2 * heads.head_dim**2)


def _times_and_memory(timings: Timings, calls: dict[str, Attention]) -> Row:
    """Return milliseconds and temporary megabytes of every call, and the ratios of their times."""
    row: Row = {"temporary_megabytes": temporary_megabytes(calls["linear"])}
    for name, call in calls.items():
        prefix = "" if name == "linear" else f"{name}_"
        row[f"{prefix}milliseconds"] = 1e3 * timings.median(name)
        if prefix:
            row[f"{prefix}megabytes"] = temporary_megabytes(call)
    if "both" in calls:
        row["backward_ratio"] = timings.ratio("both", "linear").value - 1
    if "sdpa" in calls:
        row |= timings.ratio("sdpa", "linear").fields("speedup")
    if {"both", "sdpa_both"} <= set(calls):
        row["both_speedup"] = timings.ratio("sdpa_both", "both").value
    for name in {"square", "cumsum", "fla"} & set(calls):
        row[f"{name}_speedup"] = timings.ratio(name, "linear").value
    return row


def forward_and_backward(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Attention:
    """Return a call of attention and of its backward."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def call() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return torch.autograd.grad(out, inputs, out.detach())

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


def find_fla() -> Callable[..., Any] | None:
    """Return the PyTorch form of flash-linear-attention, if it is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU
            module = importlib.import_module("fla.ops.linear_attn.naive")
    except ImportError:
        return None
    return module.naive_chunk_linear_attn


def flash_linear_attention(
    attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    """Return a call of flash-linear-attention.

    Keys and values, which it takes for every query head, are repeated beforehand: not timed.
    """
    group = q.shape[1] // k.shape[1]
    queries = q.transpose(1, 2)
    keys, values = (x.repeat_interleave(group, 1).transpose(1, 2) for x in (k, v))

    def call() -> Tensor:
        found = attend(_elu_plus_one(queries), _elu_plus_one(keys), values, 1.0, normalize=False)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


def _features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """elu+1 of q [B, Hkv, G, T, D] and k [B, Hkv, 1, T, D], and v beside them."""
    queries = _elu_plus_one(q).unflatten(1, (k.shape[1], -1))
    return queries, _elu_plus_one(k).unsqueeze(2), v.unsqueeze(2)


def _elu_plus_one(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


@benchmark(app, "linear_decode", "dtype", "shape", lengths=DECODED, seconds=2.0)
def linear_decode(plan: Plan) -> None:
    """Time chunkwise_linear_attention (elu+1) of few tokens that continue from a state.

    PyTorch takes one token at a time: baddbmm for the state, bmm for the queries.
    """
    title = "chunkwise_linear_attention (elu+1) with a state: beside the recurrence in PyTorch"
    with Report(plan, title, lengths=plan.lengths) as report, torch.no_grad():
        for case in plan.cases():
            for length in plan.lengths:
                q, k, v = case.qkv(length)
                state = torch.randn(1, k.shape[1], k.shape[3], k.shape[3])
                calls = {
                    "linear": partial(ops.chunkwise_linear_attention, q, k, v, None, state),
                    "pytorch": partial(decode, q, k, v, state),
                }
                timings = compare(calls, plan.seconds)
                row = speedup_fields(timings, "linear", "pytorch", "microseconds")
                report.add(**case.fields, length=length, **row)


def decode(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Attend token by token: out [1, Hq, T, Dv] of the dtype of q, and the state after them."""
    kv_heads = k.shape[1]
    past = state[0]
    queries, keys, values = _elu_plus_one(q[0].float()), _elu_plus_one(k[0].float()), v[0].float()
    outs = []
    for t in range(q.shape[2]):
        past = torch.baddbmm(past, keys[:, t].unsqueeze(2), values[:, t].unsqueeze(1))
        outs.append(torch.bmm(queries[:, t].unflatten(0, (kv_heads, -1)), past).flatten(0, 1))
    return torch.stack(outs, 1).to(q.dtype).unsqueeze(0), past.unsqueeze(0)


if __name__ == "__main__":
    app()
