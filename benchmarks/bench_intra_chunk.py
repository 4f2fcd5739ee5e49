"""Phase 1: causal attention inside a chunk, column sums included."""

from __future__ import annotations

import _options as options
import torch.nn.functional as F
from _kernel_rows import COLUMNS, kernel_row
from _report import Report, Row

from h2o_prefill import ops
from h2o_prefill.config import dense_dot_products


def main(
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: options.DtypeOption = None,
    shape: options.ShapeOption = None,
    seconds: options.SecondsOption = 5.0,
    quick: options.QuickOption = False,
) -> None:
    """Time one chunk of phase 1 against the FMA peak and against causal SDPA."""
    plan = options.make_plan("intra_chunk", json, threads, dtype, shape, seconds, quick)
    size = 64 if quick else 1024
    title = f"intra_chunk_attention, S={size}: beside torch SDPA (causal, enable_gqa) and the peaks"
    with Report(plan, title, COLUMNS, chunk_size=size) as report:
        for case in plan.cases():
            report.add(**case.fields, **_row(case, size, plan.seconds))


def _row(case: options.Case, size: int, seconds: float) -> Row:
    q, k, v = case.heads.qkv(size, case.dtype)
    return kernel_row(
        lambda: ops.intra_chunk_attention(q, k, v, size),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        case.heads.attention_flops(dense_dot_products(size)),
        case.threads,
        seconds,
    )


app = options.command(main)

if __name__ == "__main__":
    app()
