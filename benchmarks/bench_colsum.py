"""What the column sums cost: the attention step of the operators with them, and without."""

from __future__ import annotations

from bench_intra_chunk import GPU_CHUNKS
from common import options
from common.colsum import attend_chunk
from common.gpu_profile import kernel_seconds
from common.plan import Plan
from common.report import CASE_COLUMNS, Report, Row, ratio_fields
from common.shapes import random_memory
from common.timing import compare, spread
from torch import Tensor

from h2o_prefill import ops

COLUMNS = {
    "phase": "{phase}",
    **CASE_COLUMNS,
    "ms with": "{milliseconds:.3f}",
    "ms without": "{milliseconds_without:.3f}",
    "cost": "{cost_percent:+.2f} % ({cost_percent_q1:+.2f} to {cost_percent_q3:+.2f})",
}


@options.benchmark("colsum", "dtype", "shape", "device", seconds=10.0)
def main(plan: Plan) -> None:
    """Time one chunk of either phase with column sums against the same without.

    The operators always compute them. So on a CPU the kernels are compiled into a library of the
    benchmark's own, and called below the operators. On a GPU they are kernels of their own, whose
    times a profiler takes: phase 1 of 32 chunks, since one does not fill a GPU.
    """
    size, memory, past = (64, 32, 128) if plan.quick else (1024, 512, 8192)
    title = f"column sums, S={size}, M={memory}: the attention step with them against without"
    with Report(plan, title, COLUMNS, chunk_size=size, memory=memory, past=past) as report:
        for case in plan.cases():
            chunk = case.qkv(GPU_CHUNKS * size if plan.on_gpu else size)
            history = case.qkv(size, past)
            indices = random_memory(case.heads.kv_heads, memory, past).to(case.device)
            row = _gpu_row if plan.on_gpu else _row
            phase1 = row(chunk, None, size, plan.seconds)
            report.add(phase="intra_chunk", **case.fields, **phase1)
            phase2 = row(history, indices, size, plan.seconds)
            report.add(phase="memory", **case.fields, **phase2)


def _gpu_row(
    qkv: tuple[Tensor, Tensor, Tensor], indices: Tensor | None, size: int, seconds: float
) -> Row:
    def call() -> object:
        if indices is None:
            return ops.intra_chunk_attention(*qkv, size)
        return ops.memory_attention(*qkv, indices)

    rounds = kernel_seconds(call, ("attend_forward", "column_sums"), seconds)
    forward = spread([r["attend_forward"] for r in rounds]).median
    cost = spread([100 * r["column_sums"] / r["attend_forward"] for r in rounds])
    sums = spread([r["column_sums"] for r in rounds]).median
    return {
        "milliseconds": 1e3 * (forward + sums),
        "milliseconds_without": 1e3 * forward,
        "rounds": len(rounds),
        "cost_percent": cost.median,
        "cost_percent_q1": cost.q1,
        "cost_percent_q3": cost.q3,
    }


def _row(
    qkv: tuple[Tensor, Tensor, Tensor], indices: Tensor | None, size: int, seconds: float
) -> Row:
    timings = compare(
        {
            "with": lambda: attend_chunk(*qkv, True, indices),
            "without": lambda: attend_chunk(*qkv, False, indices),
        },
        seconds,
    )
    ratio = ratio_fields("cost_percent", timings.ratio("with", "without"))
    return {
        "milliseconds": 1e3 * timings.median("with"),
        "milliseconds_without": 1e3 * timings.median("without"),
        "rounds": timings.rounds,
        **{name: 100 * (value - 1) for name, value in ratio.items()},
    }


app = options.command(main)

if __name__ == "__main__":
    app()
