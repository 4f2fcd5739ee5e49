"""Mixed prompts for a long time: no wrong result, and memory flat.

    python tests/soak --minutes 30 --seed 1

The exit code is 0 if all is well. `--item` repeats one item that went wrong.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

# Threads that wait sleep: others may use the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import typer
from rich.console import Console
from rich.table import Table
from soak.memory_watch import MIB, Reading
from soak.soak_run import SoakRun

console = Console()


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long to run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other items.")] = 0,
    item: Annotated[int | None, typer.Option(help="Run just the item of this seed.")] = None,
) -> None:
    """Run random prompts through the operators, contexts and models, and watch memory."""
    run = SoakRun(seed, 60 * minutes)
    if item is not None:
        run.run_item(item)
        console.print("".join(run.failures) or f"item {item} {[*run.items]}: right", markup=False)
        raise typer.Exit(int(bool(run.failures)))
    well = run.run(partial(print_progress, run))
    for problem in run.problems():
        console.print(problem, markup=False, highlight=False)
    console.print(summary_table(run))
    raise typer.Exit(int(not well))


def print_progress(run: SoakRun, reading: Reading) -> None:
    """Print a line for every sixth reading, which is a minute."""
    if len(run.memory.readings) % 6 == 1:
        console.print(
            f"{time.strftime('%H:%M:%S')}  {reading.seconds:6.0f} s  {run.items.total():7,} items  "
            f"{reading.resident / MIB:8.1f} MiB  {reading.tensors:,} tensors  "
            f"{len(run.failures)} wrong",
            highlight=False,
        )


def summary_table(run: SoakRun) -> Table:
    """Return items, exceptions, errors and memory of a run."""
    table = Table("", "", "", title=f"soak, seed {run.seed}")
    for kind, number in sorted(run.items.items()):
        table.add_row(f"items: {kind}", f"{number:,}", f"{run.spent[kind]:,.0f} s")
    for kind, number in sorted(run.judge.exceptions.items()):
        table.add_row(f"injected: {kind}", f"{number:,}", "")
    for dtype, part in sorted(run.judge.worst.items()):
        table.add_row(f"largest error: {dtype}", f"{part:.0%} of its limit", "")
    if run.memory.readings:
        first, last = run.memory.readings[0], run.memory.readings[-1]
        resident = f"{first.resident / MIB:,.1f} to {last.resident / MIB:,.1f}"
        most = max(reading.resident for reading in run.memory.readings) / MIB
        table.add_row("resident, MiB", resident, f"at most {most:,.1f}")
        table.add_row("live tensors", f"{first.tensors:,} to {last.tensors:,}", "")
        table.add_row("live objects of ours", f"{first.objects:,} to {last.objects:,}", "")
    table.add_row("problems", str(len(run.problems())), "")
    return table


if __name__ == "__main__":
    typer.run(main)
