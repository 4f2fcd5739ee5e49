"""The update of a layer's scores, in place, against PyTorch's scatter_add_."""

from __future__ import annotations

import torch
from common import options
from common.context import score_update
from common.plan import Plan
from common.report import Report, Row, speedup_fields
from common.timing import compare

COLUMNS = {
    "KV heads": "{kv_heads}",
    "positions": "{positions}",
    "M": "{memory}",
    "threads": "{threads}",
    "us a layer": "{microseconds:.2f}",
    "scatter_add_ us": "{pytorch_microseconds:.2f}",
    "against scatter_add_": "{speedup:.1f}x ({speedup_q1:.1f} to {speedup_q3:.1f})",
}


@options.benchmark("scores", seconds=2.0)
def main(plan: Plan) -> None:
    """Time MemorySetTracker::accumulate_memory_scores of one layer, both sides in C++."""
    positions, sizes = (256, (32,)) if plan.quick else (8192, (512, 768))
    with Report(plan, "score update of one layer: beside scatter_add_", COLUMNS) as report:
        for memory in sizes:
            for count in plan.threads:
                torch.set_num_threads(count)
                row = _row(8, positions, memory, plan.seconds)
                report.add(kv_heads=8, positions=positions, threads=count, memory=memory, **row)


def _row(kv_heads: int, positions: int, memory: int, seconds: float) -> Row:
    with score_update(kv_heads, positions, memory) as pair:
        timings = compare({"ours": pair.ours, "pytorch": pair.baseline}, seconds)
    return speedup_fields(timings, "ours", "pytorch", "microseconds")


app = options.command(main)

if __name__ == "__main__":
    app()
