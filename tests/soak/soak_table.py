"""The summary of a run."""

from __future__ import annotations

from memory_watch import MIB
from rich.table import Table
from soak_run import SoakRun


def summary_table(run: SoakRun) -> Table:
    """Return items, exceptions, errors and memory of a run."""
    table = Table("", "", "", title=f"soak, seed {run.seed}")
    for kind, count in sorted(run.counts.items()):
        table.add_row(f"items: {kind}", f"{count.items:,}", f"{count.seconds:,.0f} s")
    table.add_section()
    for kind, number in sorted(run.judge.exceptions.items()):
        table.add_row(f"injected: {kind}", f"{number:,}", "")
    table.add_section()
    for dtype, worst in sorted(run.judge.worst.items()):
        table.add_row(
            f"largest error: {dtype}",
            f"{worst.error:.2g} of {worst.limit:.2g} allowed",
            f"{worst.compared:,} comparisons",
        )
    table.add_section()
    if run.memory.readings:
        first, last = run.memory.readings[0], run.memory.readings[-1]
        most = max(reading.resident for reading in run.memory.readings)
        table.add_row(
            "resident, MiB",
            f"{first.resident / MIB:,.1f} to {last.resident / MIB:,.1f}",
            f"at most {most / MIB:,.1f}",
        )
        table.add_row("live tensors", f"{first.tensors:,} to {last.tensors:,}", "")
        table.add_row("live objects of ours", f"{first.objects:,} to {last.objects:,}", "")
    table.add_section()
    table.add_row("problems", str(len(run.problems())), "")
    return table
