"""Gathering the rows of a memory set, against a contiguous copy of as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from common import options
from common.plan import Plan
from common.report import CASE_COLUMNS, Report, ratio_fields
from common.shapes import random_memory
from common.timing import compare
from torch import Tensor

from h2o_prefill import ops

COLUMNS = {
    **CASE_COLUMNS,
    "GB/s": "{gigabytes:.1f}",
    "copy GB/s": "{copy_gigabytes:.1f}",
    "% of copy": "{percent:.0f} ({percent_q1:.0f} to {percent_q3:.0f})",
    "torch.gather GB/s": "{torch_gigabytes:.1f}",
}

# Calls go through this many index sets, and copies through as many windows, so that both find
# about as much of what they read in the caches.
_SETS = 16


@options.benchmark("gather", "dtype", "shape", seconds=2.0)
def main(plan: Plan) -> None:
    """Time gather_rows beside clone() of M rows that lie next to each other."""
    memory, past = (32, 256) if plan.quick else (512, 8192)
    title = (
        f"gather_rows, M={memory} sorted rows of {past}: beside a contiguous copy of the same bytes"
    )
    with Report(plan, title, COLUMNS, memory=memory, past=past) as report:
        for case in plan.cases():
            keys = case.heads.qkv(past, case.dtype)[1].contiguous()
            # Read and written.
            size = 2 * case.heads.kv_heads * memory * case.heads.head_dim * case.dtype.itemsize
            timings = compare(_calls(keys, memory), plan.seconds)
            share = ratio_fields("percent", timings.ratio("copy", "gather"))
            report.add(
                **case.fields,
                gigabytes=size / timings.median("gather") / 1e9,
                copy_gigabytes=size / timings.median("copy") / 1e9,
                torch_gigabytes=size / timings.median("torch") / 1e9,
                rounds=timings.rounds,
                **{name: 100 * value for name, value in share.items()},
            )


def _calls(keys: Tensor, memory: int) -> dict[str, Callable[[], object]]:
    _, kv_heads, past, dim = keys.shape
    sets = [random_memory(kv_heads, memory, past, seed) for seed in range(_SETS)]
    wide = [indices.long().unsqueeze(-1).expand(-1, -1, -1, dim) for indices in sets]
    begins = [begin * (past - memory) // (_SETS - 1) for begin in range(_SETS)]
    next_set, next_wide = itertools.cycle(sets), itertools.cycle(wide)
    next_begin = itertools.cycle(begins)

    def copy() -> Tensor:
        begin = next(next_begin)
        return keys[:, :, begin : begin + memory].clone(memory_format=torch.contiguous_format)

    return {
        "gather": lambda: ops.gather_rows(keys, next(next_set)),
        "copy": copy,
        "torch": lambda: keys.gather(2, next(next_wide)),
    }


app = options.command(main)

if __name__ == "__main__":
    app()
