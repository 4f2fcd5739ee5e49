"""Exact attention where sparse prefill needs it: single chunks, dense tails, decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import options
from common.context import dense_call
from common.plan import Case, Plan
from common.report import CASE_COLUMNS, Report, Row, ratio_fields, speedup_fields
from common.timing import compare
from torch import Tensor

from h2o_prefill import ops

COLUMNS = {
    **CASE_COLUMNS,
    "rows": "{rows}",
    "keys": "{keys}",
    "ms": "{milliseconds:.3f}",
    "SDPA ms": "{sdpa_milliseconds:.3f}",
    "against SDPA": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "C++ PrefillContext": "{context:.2f}x ({context_q1:.2f} to {context_q3:.2f})",
}
# Queries, and keys of the history: decoding, short calls, a dense tail, one chunk, dense prefill.
SIZES = [
    *((1, 1024), (1, 4096), (1, 16384), (16, 4096), (500, 4596)),
    *((128, 8192), (1024, 1024), (4096, 4096)),
]


@options.benchmark("dense", "dtype", "shape", seconds=3.0)
def main(plan: Plan) -> None:
    """Time dense_attention against torch SDPA with the fastest arguments for the same result.

    The last column is the time of a dense call through the C++ class PrefillContext, in that of
    dense_attention, called from C++ as well.
    """
    sizes = [(1, 200), (40, 200), (200, 200)] if plan.quick else SIZES
    title = "dense_attention: beside torch SDPA (enable_gqa) over the same keys"
    with Report(plan, title, COLUMNS, sizes=sizes) as report:
        for case in plan.cases():
            for rows, keys in sizes:
                report.add(**case.fields, **_row(case, rows, keys, plan.seconds))


def _row(case: Case, rows: int, keys: int, seconds: float) -> Row:
    q, k, v = case.heads.qkv(rows, case.dtype, past=keys - rows)

    def sdpa() -> Tensor:
        mask = None
        if 1 < rows < keys:
            mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=rows == keys, enable_gqa=True
        )

    timings = compare({"kernel": lambda: ops.dense_attention(q, k, v), "sdpa": sdpa}, seconds)
    with dense_call(q, k, v) as pair:
        through_context = compare({"context": pair.ours, "kernel": pair.baseline}, seconds)
        if not pair.same():
            raise RuntimeError("PrefillContext must give what dense_attention gives")
    return {
        "rows": rows,
        "keys": keys,
        **speedup_fields(timings, "kernel", "sdpa"),
        **ratio_fields("context", through_context.ratio("context", "kernel")),
    }


app = options.command(main)

if __name__ == "__main__":
    app()
