"""The peaks of this machine: multiply-adds, bf16 dot products, memory traffic."""

from __future__ import annotations

import torch
from common import hardware_peak, options
from common.plan import Plan
from common.report import Report
from common.timing import compare

# Larger than the caches, so that memory is what is measured.
_BUFFER = 512 << 20
_QUICK_BUFFER = 1 << 20

COLUMNS = {
    "kind": "{kind}",
    "threads": "{threads}",
    "G/s": "{rate:.1f}",
    "unit": "{unit}",
    "per thread": "{rate_per_thread:.1f}",
    "best call": "{best_rate:.1f}",
}


@options.benchmark("cpu_peak", seconds=3.0)
def main(plan: Plan) -> None:
    """Measure what this CPU can do at most: flop/s by instruction set, bytes/s of memory."""
    title = "Peaks: flops of multiply-adds and bf16 dot products; bytes read, and read plus written"
    size = _QUICK_BUFFER if plan.quick else _BUFFER
    with Report(plan, title, COLUMNS, buffer_bytes=size) as report:
        for count in plan.threads:
            torch.set_num_threads(count)
            work = {kind: hardware_peak.arithmetic(kind, count) for kind in hardware_peak.kinds()}
            work |= hardware_peak.memory(count, size)
            timings = compare({name: item.run for name, item in work.items()}, plan.seconds)
            for name, item in work.items():
                rate = item.amount / timings.median(name) / 1e9
                report.add(
                    kind=name,
                    threads=count,
                    unit="byte/s" if name.startswith("memory") else "flop/s",
                    rate=rate,
                    rate_per_thread=rate / count,
                    best_rate=item.amount / min(timings.seconds[name]) / 1e9,
                    rounds=timings.rounds,
                )


app = options.command(main)

if __name__ == "__main__":
    app()
