"""Phase 2: attention of a chunk to a memory set, column sums included."""

from __future__ import annotations

from common import options
from common.kernel_rows import COLUMNS, gpu_kernel_row, kernel_row
from common.plan import Case, Plan
from common.report import Report, Row
from common.sdpa import gpu_attention, sdpa
from common.shapes import random_memory

from h2o_prefill import ops


@options.benchmark("memory", "dtype", "shape", "device", seconds=5.0)
def main(plan: Plan) -> None:
    """Time one chunk of phase 2 against SDPA over gathered keys, and on a CPU the FMA peak.

    SDPA gets its keys and values gathered beforehand; the operator gathers them itself.
    """
    size, memory, past = (64, 32, 128) if plan.quick else (1024, 512, 8192)
    title = (
        f"memory_attention, S={size}, M={memory} of {past} tokens: beside torch SDPA over keys "
        "that are gathered already" + ("" if plan.on_gpu else ", and the peaks")
    )
    with Report(plan, title, COLUMNS, chunk_size=size, memory=memory, past=past) as report:
        for case in plan.cases():
            report.add(**case.fields, **_row(case, size, memory, past, plan.seconds))


def _row(case: Case, size: int, memory: int, past: int, seconds: float) -> Row:
    indices = random_memory(case.heads.kv_heads, memory, past).to(case.device)
    q, k, v = case.qkv(size, past)
    keys, values = ops.gather_rows(k, indices), ops.gather_rows(v, indices)
    flops = case.heads.attention_flops(size * memory)

    def kernel() -> object:
        return ops.memory_attention(q, k, v, indices)

    if case.on_gpu:
        baselines = gpu_attention(q, keys, values, causal=False)
        return gpu_kernel_row(kernel, baselines, flops, seconds)
    return kernel_row(kernel, sdpa(q, keys, values, causal=False), flops, case.threads, seconds)


app = options.command(main)

if __name__ == "__main__":
    app()
