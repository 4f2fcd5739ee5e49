"""Phase 1: causal attention inside a chunk, column sums included."""

from __future__ import annotations

from common import options
from common.kernel_rows import COLUMNS, gpu_kernel_row, kernel_row
from common.plan import Case, Plan
from common.report import Report, Row
from common.sdpa import gpu_attention, sdpa

from h2o_prefill import ops
from h2o_prefill.eval.attention_flops import dense_dot_products

# A GPU has room for the chunks of a long prompt at once: phase 1 of all is one launch.
GPU_CHUNKS = 32


@options.benchmark("intra_chunk", "dtype", "shape", "device", seconds=5.0)
def main(plan: Plan) -> None:
    """Time phase 1 against causal SDPA: on a CPU one chunk, and the FMA peak; on a GPU 32."""
    size = 64 if plan.quick else 1024
    chunks = GPU_CHUNKS if plan.on_gpu else 1
    if plan.on_gpu:
        title = f"S={size}, {chunks} chunks: beside torch SDPA (causal), the chunks as its batch"
    else:
        title = f"S={size}: beside torch SDPA (causal, enable_gqa) and the peaks"
    title = f"intra_chunk_attention, {title}"
    with Report(plan, title, COLUMNS, chunk_size=size, chunks=chunks) as report:
        for case in plan.cases():
            row = _gpu_row if plan.on_gpu else _row
            report.add(**case.fields, **row(case, size, plan.seconds))


def _gpu_row(case: Case, size: int, seconds: float) -> Row:
    q, k, v = case.qkv(GPU_CHUNKS * size)
    # [1, H, chunks * S, D] as [chunks, H, S, D], in place.
    by_chunk = [x[0].unflatten(1, (GPU_CHUNKS, size)).transpose(0, 1) for x in (q, k, v)]
    return gpu_kernel_row(
        lambda: ops.intra_chunk_attention(q, k, v, size),
        gpu_attention(*by_chunk, causal=True),
        GPU_CHUNKS * case.heads.attention_flops(dense_dot_products(size)),
        seconds,
    )


def _row(case: Case, size: int, seconds: float) -> Row:
    q, k, v = case.qkv(size)
    return kernel_row(
        lambda: ops.intra_chunk_attention(q, k, v, size),
        sdpa(q, k, v, causal=True),
        case.heads.attention_flops(dense_dot_products(size)),
        case.threads,
        seconds,
    )


app = options.command(main)

if __name__ == "__main__":
    app()
