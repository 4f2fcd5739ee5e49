"""What the column sums cost: the attention step of the operators with them, and without."""

from __future__ import annotations

import _options as options
from _colsum import attend_chunk
from _report import Report, Row, ratio_fields
from _shapes import random_memory
from _timing import compare
from torch import Tensor

COLUMNS = {
    "phase": "{phase}",
    "model": "{model}",
    "D": "{head_dim}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "ms with": "{milliseconds:.3f}",
    "ms without": "{milliseconds_without:.3f}",
    "cost": "{cost_percent:+.2f} % ({cost_percent_q1:+.2f} to {cost_percent_q3:+.2f})",
}


def main(
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: options.DtypeOption = None,
    shape: options.ShapeOption = None,
    seconds: options.SecondsOption = 10.0,
    quick: options.QuickOption = False,
) -> None:
    """Time one chunk of either phase with column sums against the same without.

    The operators always compute them, so the kernels are compiled into a library of the benchmark's
    own, and called below the operators.
    """
    plan = options.make_plan("colsum", json, threads, dtype, shape, seconds, quick)
    size, memory, past = (64, 32, 128) if quick else (1024, 512, 8192)
    title = f"column sums, S={size}, M={memory}: the attention step with them against without"
    with Report(plan, title, COLUMNS, chunk_size=size, memory=memory, past=past) as report:
        for case in plan.cases():
            chunk = case.heads.qkv(size, case.dtype)
            report.add(phase="intra_chunk", **case.fields, **_row(chunk, None, plan.seconds))
            history = case.heads.qkv(size, case.dtype, past=past)
            indices = random_memory(case.heads.kv_heads, memory, past)
            report.add(phase="memory", **case.fields, **_row(history, indices, plan.seconds))


def _row(qkv: tuple[Tensor, Tensor, Tensor], indices: Tensor | None, seconds: float) -> Row:
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
