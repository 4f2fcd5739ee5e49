"""Phase 2: attention of a chunk to a memory set, column sums included."""

from __future__ import annotations

import _options as options
import torch.nn.functional as F
from _kernel_rows import COLUMNS, kernel_row
from _report import Report, Row
from _shapes import random_memory

from h2o_prefill import ops


def main(
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: options.DtypeOption = None,
    shape: options.ShapeOption = None,
    seconds: options.SecondsOption = 5.0,
    quick: options.QuickOption = False,
) -> None:
    """Time one chunk of phase 2 against the FMA peak and against SDPA over gathered keys.

    SDPA gets its keys and values gathered beforehand; the operator gathers them itself.
    """
    plan = options.make_plan("memory", json, threads, dtype, shape, seconds, quick)
    size, memory, past = (64, 32, 128) if quick else (1024, 512, 8192)
    title = (
        f"memory_attention, S={size}, M={memory} of {past} tokens: beside torch SDPA over keys "
        "that are gathered already, and the peaks"
    )
    with Report(plan, title, COLUMNS, chunk_size=size, memory=memory, past=past) as report:
        for case in plan.cases():
            report.add(**case.fields, **_row(case, size, memory, past, plan.seconds))


def _row(case: options.Case, size: int, memory: int, past: int, seconds: float) -> Row:
    indices = random_memory(case.heads.kv_heads, memory, past)
    q, k, v = case.heads.qkv(size, case.dtype, past=past)
    keys, values = ops.gather_rows(k, indices), ops.gather_rows(v, indices)
    return kernel_row(
        lambda: ops.memory_attention(q, k, v, indices),
        lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True),
        case.heads.attention_flops(size * memory),
        case.threads,
        seconds,
    )


app = options.command(main)

if __name__ == "__main__":
    app()
