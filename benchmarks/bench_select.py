"""Selection of a memory set: one layer, against the same choice in plain PyTorch."""

from __future__ import annotations

import torch
from common import options
from common.plan import Plan
from common.report import Report, Row, speedup_fields
from common.shapes import random_memory
from common.timing import compare
from torch import Tensor

from h2o_prefill import ops

COLUMNS = {
    "KV heads": "{kv_heads}",
    "S": "{chunk_size}",
    "M": "{memory}",
    "threads": "{threads}",
    "ms a layer": "{milliseconds:.4f}",
    "PyTorch ms": "{pytorch_milliseconds:.4f}",
    "against PyTorch": "{speedup:.1f}x ({speedup_q1:.1f} to {speedup_q3:.1f})",
}


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


@options.benchmark("select", seconds=2.0)
def main(plan: Plan) -> None:
    """Time the selection of one layer's memory sets."""
    size, budget, past = (64, 16, 256) if plan.quick else (1024, 256, 8192)
    title = f"select_memory, L=H={budget}: beside gather, topk and sort of PyTorch"
    with Report(plan, title, COLUMNS, local_window=budget, heavy_budget=budget) as report:
        for kv_heads in (3, 8):
            for count in plan.threads:
                torch.set_num_threads(count)
                row = _row(kv_heads, size, budget, past, plan.seconds)
                report.add(kv_heads=kv_heads, chunk_size=size, threads=count, **row)


def _row(kv_heads: int, size: int, budget: int, past: int, seconds: float) -> Row:
    memory = random_memory(kv_heads, 2 * budget, past)
    end = past + size
    scores = torch.rand(1, kv_heads, end, generator=torch.Generator().manual_seed(0))
    timings = compare(
        {
            "select": lambda: ops.select_memory(scores, memory, past, end, budget, budget, 0),
            "pytorch": lambda: select_with_pytorch(scores, memory, past, end, budget, budget),
        },
        seconds,
    )
    return {"memory": 2 * budget, **speedup_fields(timings, "select", "pytorch")}


app = options.command(main)

if __name__ == "__main__":
    app()
