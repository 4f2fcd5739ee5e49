"""Mixed prompts for a long time: no wrong result, and memory flat.

    python tests/soak --minutes 30 --seed 1

The exit code is 0 if all is well. `--item` repeats one item that went wrong.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

# Threads that wait sleep: others may use the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import typer
from rich.console import Console
from rich.table import Table
from soak.memory_watch import MIB, Reading
from soak.soak_run import Item, SoakRun

console = Console()


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long to run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other items.")] = 0,
    item: Annotated[int | None, typer.Option(help="Run just the item of this seed.")] = None,
    leak: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run random prompts through the operators, contexts and models, and watch memory."""
    run = SoakRun(seed, 60 * minutes, leak)
    if item is not None:
        found = Item.from_seed(item)
        run.run_item(found)
        console.print("".join(run.failures) or f"item {item} ({found.kind}): right", markup=False)
        raise typer.Exit(int(bool(run.failures)))
    well = run.run(_Progress(run))
    for problem in run.problems():
        console.print(problem, markup=False, highlight=False)
    console.print(summary_table(run))
    raise typer.Exit(int(not well))


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


class _Progress:
    """Prints a line a minute."""

    def __init__(self, run: SoakRun) -> None:
        self._run = run
        self._next = 0.0

    def __call__(self, reading: Reading) -> None:
        if reading.seconds < self._next:
            return
        self._next = reading.seconds + 60
        items = sum(count.items for count in self._run.counts.values())
        console.print(
            f"{time.strftime('%H:%M:%S')}  {reading.seconds:6.0f} s  {items:7,} items  "
            f"{reading.resident / MIB:8.1f} MiB  {reading.tensors:,} tensors  "
            f"{len(self._run.failures)} wrong",
            highlight=False,
        )


if __name__ == "__main__":
    typer.run(main)
