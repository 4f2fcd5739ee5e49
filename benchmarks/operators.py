"""Single operators, each beside its baseline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from common import native
from common.attention import beside_sdpa, random_memory, sdpa, sdpa_calls, window_calls
from common.benchmark import Case, Plan, benchmark, new_app
from common.compare import compare, spread
from common.layers import LAYER_TOKENS, LAYERS, WEIGHT_BYTES, layer_calls
from common.machine import kernel_seconds
from common.report import Report, Row, speedup_fields
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.eval.attention_flops import dense_dot_products

app = new_app()

# A GPU has room for the chunks of a long prompt at once: phase 1 of all is one launch.
GPU_CHUNKS = 32
# Bytes that a peak reads or copies: more than the caches hold, so that memory is what is measured.
PEAK_BUFFER = 512 << 20
# Queries, and keys of the history: decoding, short calls, a dense tail, one chunk, dense prefill.
DENSE_SIZES = [
    *((1, 1024), (1, 4096), (1, 16384), (16, 4096), (500, 4596)),
    *((128, 8192), (1024, 1024), (4096, 4096)),
]
# Index sets and windows that gathers and copies go through, so that both find about as much of
# what they read in the caches.
GATHERED_SETS = 16
# Sliding windows, and tokens of a dense call whose flop/s theirs are a share of.
WINDOWS = (512, 1024, 4096)
DENSE_TOKENS = 4096
MOST_BYTES = 2 << 30  # that a baseline may take for a mask, or for logits


@benchmark(app, "cpu_peak", seconds=3.0)
def cpu_peak(plan: Plan) -> None:
    """Measure what this CPU can do at most: flop/s by instruction set, bytes/s of memory."""
    title = "Peaks: flops of multiply-adds and bf16 dot products; bytes read, and read plus written"
    size = 1 << 20 if plan.quick else PEAK_BUFFER
    with Report(plan, title, buffer_bytes=size) as report:
        for count in plan.each_threads():
            work = {kind: native.peak(kind, count) for kind in native.peak_kinds()}
            work |= native.memory_traffic(count, size)
            timings = compare({name: item.run for name, item in work.items()}, plan.seconds)
            for name, item in work.items():
                rate = item.amount / timings.median(name) / 1e9
                report.add(
                    kind=name,
                    threads=count,
                    unit="byte/s" if name.startswith("memory") else "flop/s",
                    rate=rate,
                    rate_per_thread=rate / count,
                    best_rate=item.amount / min(timings.seconds[name]) / 1e9,
                    rounds=timings.rounds,
                )


@benchmark(app, "intra_chunk", "dtype", "shape", "device", seconds=5.0)
def intra_chunk(plan: Plan) -> None:
    """Time phase 1 against causal SDPA: on a CPU one chunk, and the peaks; on a GPU 32 chunks."""
    size, chunks = 64 if plan.quick else 1024, GPU_CHUNKS if plan.on_gpu else 1
    beside = "the chunks as its batch" if plan.on_gpu else "and the peaks"
    title = f"intra_chunk_attention, S={size}, {chunks} chunks: beside causal SDPA, {beside}"
    with Report(plan, title, chunk_size=size, chunks=chunks) as report:
        for case in plan.cases():
            q, k, v = case.qkv(chunks * size)
            # [1, H, chunks * S, D] as [chunks, H, S, D], in place.
            by_chunk = [x[0].unflatten(1, (chunks, size)).transpose(0, 1) for x in (q, k, v)]
            kernel = partial(ops.intra_chunk_attention, q, k, v, size)
            flops = chunks * case.heads.attention_flops(dense_dot_products(size))
            baselines = sdpa_calls(*by_chunk, causal=True)
            report.add(**case.fields, **_kernel_row(case, kernel, baselines, flops, plan.seconds))


@benchmark(app, "memory", "dtype", "shape", "device", seconds=5.0)
def memory(plan: Plan) -> None:
    """Time one chunk of phase 2 against SDPA over gathered keys, and on a CPU the FMA peak.

    SDPA gets its keys and values gathered beforehand; the operator gathers them itself.
    """
    size, width, past = (64, 32, 128) if plan.quick else (1024, 512, 8192)
    beside = "torch SDPA over gathered keys" + ("" if plan.on_gpu else ", and the peaks")
    title = f"memory_attention, S={size}, M={width} of {past} tokens: beside {beside}"
    with Report(plan, title, chunk_size=size, memory=width, past=past) as report:
        for case in plan.cases():
            q, k, v = case.qkv(size, past)
            indices = random_memory(case.heads.kv_heads, width, past).to(k.device)
            gathered = [ops.gather_rows(x, indices) for x in (k, v)]
            kernel = partial(ops.memory_attention, q, k, v, indices)
            flops = case.heads.attention_flops(size * width)
            baselines = sdpa_calls(q, *gathered, causal=False)
            report.add(**case.fields, **_kernel_row(case, kernel, baselines, flops, plan.seconds))


def _kernel_row(
    case: Case,
    kernel: Callable[[], object],
    baselines: Mapping[str, Callable[[], object]],
    flops: int,
    seconds: float,
) -> Row:
    """Time a kernel, PyTorch's SDPA on the same problem and, on a CPU, the peaks, in turns."""
    kinds = () if case.on_gpu else ("fma", "bf16_dot")
    peaks = {kind: work for kind in kinds if (work := native.peak(kind, case.threads))}
    calls = {"kernel": kernel, **baselines, **{kind: work.run for kind, work in peaks.items()}}
    timings = case.compare(calls, seconds)
    best, speedup = beside_sdpa(timings, "kernel", baselines)
    row: Row = {
        "milliseconds": 1e3 * timings.median("kernel"),
        "sdpa_milliseconds": 1e3 * timings.median(best),
        "gflops": flops / timings.median("kernel") / 1e9,
        **speedup,
    }
    for kind, work in peaks.items():
        suffix = "" if kind == "fma" else f"_{kind}"
        row[f"peak_gflops{suffix}"] = work.amount / timings.median(kind) / 1e9
        # Rate over rate: (flops / kernel time) / (peak flops / peak time).
        share = timings.ratio(kind, "kernel")
        row |= share.fields(f"percent{suffix}", 100 * flops / work.amount)
    return row


@benchmark(app, "colsum", "dtype", "shape", "device", seconds=10.0)
def colsum(plan: Plan) -> None:
    """Time one chunk of either phase with column sums against the same without.

    The operators always compute them. So on a CPU the kernels are compiled into a library of the
    benchmark's own, and called below the operators. On a GPU they are kernels of their own, whose
    times a profiler takes: phase 1 of 32 chunks, since one does not fill a GPU.
    """
    size, width, past = (64, 32, 128) if plan.quick else (1024, 512, 8192)
    title = f"column sums, S={size}, M={width}: the attention step with them against without"
    with Report(plan, title, chunk_size=size, memory=width, past=past) as report:
        for case in plan.cases():
            chunk = case.qkv(GPU_CHUNKS * size if plan.on_gpu else size)
            history = case.qkv(size, past)
            indices = random_memory(case.heads.kv_heads, width, past).to(history[0].device)
            row = _gpu_colsum_row if plan.on_gpu else _colsum_row
            phase1 = row(chunk, None, size, plan.seconds)
            report.add(phase="intra_chunk", **case.fields, **phase1)
            phase2 = row(history, indices, size, plan.seconds)
            report.add(phase="memory", **case.fields, **phase2)


def _gpu_colsum_row(
    qkv: tuple[Tensor, Tensor, Tensor], indices: Tensor | None, size: int, seconds: float
) -> Row:
    def call() -> object:
        if indices is None:
            return ops.intra_chunk_attention(*qkv, size)
        return ops.memory_attention(*qkv, indices)

    taken = kernel_seconds(call, ("attend_forward", "column_sums"), seconds)
    forward, sums = taken.values()
    cost = spread([100 * added / base for base, added in zip(forward, sums, strict=True)])
    without = spread(forward).median
    return {
        "milliseconds": 1e3 * (without + spread(sums).median),
        "milliseconds_without": 1e3 * without,
        "rounds": len(forward),
        "cost_percent": cost.median,
        "cost_percent_q1": cost.q1,
        "cost_percent_q3": cost.q3,
    }


def _colsum_row(
    qkv: tuple[Tensor, Tensor, Tensor], indices: Tensor | None, size: int, seconds: float
) -> Row:
    variants = (("with", True), ("without", False))
    calls = {name: partial(native.attend_chunk, *qkv, sums, indices) for name, sums in variants}
    timings = compare(calls, seconds)
    percent = timings.ratio("with", "without").fields("cost_percent", 100)
    return {
        "milliseconds": 1e3 * timings.median("with"),
        "milliseconds_without": 1e3 * timings.median("without"),
        "rounds": timings.rounds,
        **{name: value - 100 for name, value in percent.items()},
    }


@benchmark(app, "select", seconds=2.0)
def select(plan: Plan) -> None:
    """Time the selection of one layer's memory sets against the same choice in PyTorch."""
    size, budget, past = (64, 16, 256) if plan.quick else (1024, 256, 8192)
    title = f"select_memory, L=H={budget}: beside gather, topk and sort of PyTorch"
    with Report(plan, title, local_window=budget, heavy_budget=budget) as report:
        for kv_heads in (3, 8):
            indices = random_memory(kv_heads, 2 * budget, past)
            scores = torch.rand(
                1, kv_heads, past + size, generator=torch.Generator().manual_seed(0)
            )
            where = (scores, indices, past, past + size, budget, budget)
            calls = {
                "select": partial(ops.select_memory, *where, 0),
                "pytorch": partial(select_with_pytorch, *where),
            }
            for count in plan.each_threads():
                fields = {"kv_heads": kv_heads, "chunk_size": size, "memory": 2 * budget}
                row = speedup_fields(compare(calls, plan.seconds), "select", "pytorch")
                report.add(**fields, threads=count, **row)


def select_with_pytorch(
    scores: Tensor, memory: Tensor, begin: int, end: int, local_window: int, heavy_budget: int
) -> Tensor:
    """Choose what `select_memory` chooses, for full memory sets and scores without ties."""
    heads = memory.shape[1]
    fresh = torch.arange(begin, end - local_window).expand(1, heads, -1)
    candidates = torch.cat([memory.long(), fresh], dim=-1)
    best = scores.gather(-1, candidates).topk(heavy_budget, dim=-1, sorted=False).indices
    heavy = candidates.gather(-1, best).sort(dim=-1).values
    local = torch.arange(end - local_window, end).expand(1, heads, -1)
    return torch.cat([heavy, local], dim=-1).int()


@benchmark(app, "scores", seconds=2.0)
def scores(plan: Plan) -> None:
    """Time MemorySetTracker::accumulate_memory_scores of one layer, and scatter_add_, in C++."""
    positions, sizes = (256, (32,)) if plan.quick else (8192, (512, 768))
    with Report(plan, "score update of one layer: beside scatter_add_") as report:
        for width in sizes:
            for count in plan.each_threads():
                with native.score_update(8, positions, width) as pair:
                    timings = compare({"ours": pair.ours, "pytorch": pair.baseline}, plan.seconds)
                row = speedup_fields(timings, "ours", "pytorch", "microseconds")
                report.add(kv_heads=8, positions=positions, threads=count, memory=width, **row)


@benchmark(app, "gather", "dtype", "shape", seconds=2.0)
def gather(plan: Plan) -> None:
    """Time gather_rows beside clone() of M rows that lie next to each other."""
    width, past = (32, 256) if plan.quick else (512, 8192)
    title = f"gather_rows, M={width} sorted rows of {past}: beside a copy of the same bytes"
    with Report(plan, title, memory=width, past=past) as report:
        for case in plan.cases():
            keys = case.qkv(past)[1].contiguous()
            timings = compare(_gathers(keys, width), plan.seconds)
            # Read and written.
            size = 2 * case.heads.kv_heads * width * case.heads.head_dim * case.dtype.itemsize
            report.add(
                **case.fields,
                gigabytes=size / timings.median("gather") / 1e9,
                copy_gigabytes=size / timings.median("copy") / 1e9,
                torch_gigabytes=size / timings.median("torch") / 1e9,
                rounds=timings.rounds,
                **timings.ratio("copy", "gather").fields("percent", 100),
            )


def _gathers(keys: Tensor, width: int) -> dict[str, Callable[[], object]]:
    _, kv_heads, past, dim = keys.shape
    sets = [random_memory(kv_heads, width, past, seed) for seed in range(GATHERED_SETS)]
    wide = [indices.long().unsqueeze(-1).expand(-1, -1, -1, dim) for indices in sets]
    begins = [begin * (past - width) // (GATHERED_SETS - 1) for begin in range(GATHERED_SETS)]
    next_set, next_wide, next_begin = map(itertools.cycle, (sets, wide, begins))

    def copy() -> Tensor:
        rows = keys.narrow(2, next(next_begin), width)
        return rows.clone(memory_format=torch.contiguous_format)

    return {
        "gather": lambda: ops.gather_rows(keys, next(next_set)),
        "copy": copy,
        "torch": lambda: keys.gather(2, next(next_wide)),
    }


@benchmark(app, "dense", "dtype", "shape", seconds=3.0)
def dense(plan: Plan) -> None:
    """Time dense_attention against torch SDPA with the fastest arguments for the same result.

    "context" is the time of a dense call through the C++ class PrefillContext, relative to
    dense_attention, called from C++ as well.
    """
    sizes = [(1, 200), (40, 200), (200, 200)] if plan.quick else DENSE_SIZES
    title = "dense_attention: beside torch SDPA (enable_gqa) over the same keys"
    with Report(plan, title, sizes=sizes) as report:
        for case in plan.cases():
            for rows, keys in sizes:
                row = _dense_row(*case.qkv(rows, keys - rows), plan.seconds)
                report.add(**case.fields, rows=rows, keys=keys, **row)


def _dense_row(q: Tensor, k: Tensor, v: Tensor, seconds: float) -> Row:
    rows, keys = q.shape[2], k.shape[2]

    def masked_sdpa() -> Tensor:
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    baseline = masked_sdpa if 1 < rows < keys else sdpa(q, k, v, causal=rows == keys)
    timings = compare({"kernel": partial(ops.dense_attention, q, k, v), "sdpa": baseline}, seconds)
    with native.dense_call(q, k, v) as pair:
        through_context = compare({"context": pair.ours, "kernel": pair.baseline}, seconds)
        if not pair.same():
            raise RuntimeError("PrefillContext must give what dense_attention gives")
    return {
        **speedup_fields(timings, "kernel", "sdpa"),
        **through_context.ratio("context", "kernel").fields("context"),
    }


@benchmark(
    app,
    "windows",
    "dtype",
    "shape",
    lengths=((4096, 8192, 16384, 32768, 65536, 131072), (200,)),
    seconds=10.0,
)
def windows(plan: Plan) -> None:
    """Time sliding_window_attention against SDPA with a mask, eager, and FlexAttention compiled.

    "dense percent" is its rate, in flops of visible pairs, relative to dense_attention of 4,096
    tokens.
    """
    sizes = (16, 100) if plan.quick else WINDOWS
    title = "sliding_window_attention: beside PyTorch's attention with the mask of the window"
    with Report(plan, title, windows=sizes, dense_tokens=DENSE_TOKENS) as report:
        for case in plan.cases():
            for window, length in itertools.product(sizes, plan.lengths):
                row = _window_row(case, window, length, plan)
                report.add(**case.fields, window=window, tokens=length, **row)


def _window_row(case: Case, window: int, length: int, plan: Plan) -> Row:
    q, k, v = case.qkv(length)
    short = min(length, DENSE_TOKENS)
    beside = window_calls(q, k, v, window, MOST_BYTES, compiled=not plan.quick)
    calls = {
        "kernel": partial(ops.sliding_window_attention, q, k, v, window),
        "dense": partial(ops.dense_attention, *(x[:, :, :short] for x in (q, k, v))),
        **beside,
    }
    timings = compare(calls, plan.seconds)
    seconds = timings.median("kernel")
    products = dense_dot_products(length) - dense_dot_products(max(length - window, 0))
    row: Row = {
        "milliseconds": 1e3 * seconds,
        "nanoseconds_a_token": 1e9 * seconds / length,
        "gflops": case.heads.attention_flops(products) / seconds / 1e9,
        "rounds": timings.rounds,
    }
    share = 100 * products / dense_dot_products(short)
    row |= timings.ratio("dense", "kernel").fields("dense_percent", share)
    for name in beside:
        row |= timings.ratio(name, "kernel").fields(f"speedup_over_{name}")
    return row


@benchmark(app, "linear_layer", seconds=4.0)
def linear_layer(plan: Plan) -> None:
    """Time linear() by format beside F.linear, oneDNN's packed weights, the FMA peak, and a read.

    Calls go through copies of the weights, so that few tokens read them from memory.
    """
    sizes = [(40, 96)] if plan.quick else LAYERS
    size = 1 << 20 if plan.quick else PEAK_BUFFER
    with Report(plan, "linear layers of packed weights") as report:
        for count in plan.each_threads():
            peak, read = native.peak("fma", count), native.memory_traffic(count, size)
            work = {"fma": peak, "memory": read["memory_read"]} if peak else {}
            for (inputs, outputs), tokens in itertools.product(sizes, LAYER_TOKENS):
                calls = layer_calls(inputs, outputs, tokens, size)
                beside = {name: item.run for name, item in work.items()}
                timings = compare(calls | beside, plan.seconds)
                flops = 2 * tokens * inputs * outputs
                for name in calls:
                    seconds = timings.median(name)
                    amounts = {"fma": flops, "memory": inputs * outputs * WEIGHT_BYTES[name]}
                    row = {
                        "milliseconds": 1e3 * seconds,
                        "gflops": flops / seconds / 1e9,
                        "gigabytes": amounts["memory"] / seconds / 1e9,
                        "rounds": timings.rounds,
                        **timings.ratio("F.linear float32", name).fields("speedup"),
                    }
                    for what, item in work.items():
                        share = 100 * amounts[what] / item.amount
                        row |= timings.ratio(what, name).fields(f"{what}_percent", share)
                    where = {"inputs": inputs, "outputs": outputs, "tokens": tokens}
                    report.add(weights=name, **where, threads=count, **row)


if __name__ == "__main__":
    app()
