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
from soak.memory_watch import MIB, Reading
from soak.soak_run import SoakRun


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long to run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other items.")] = 0,
    item: Annotated[int | None, typer.Option(help="Run just the item of this seed.")] = None,
) -> None:
    """Run random prompts through the operators, contexts and models, and watch memory."""
    run = SoakRun(seed, 60 * minutes)
    if item is not None:
        run.run_item(item)
        typer.echo("".join(run.failures) or f"item {item} {[*run.items]}: right")
        raise typer.Exit(int(bool(run.failures)))
    well = run.run(partial(print_progress, run))
    typer.echo("\n".join([*run.problems(), summary(run)]))
    raise typer.Exit(int(not well))


def print_progress(run: SoakRun, reading: Reading) -> None:
    """Print a line for every sixth reading, which is a minute."""
    if len(run.memory.readings) % 6 == 1:
        typer.echo(
            f"{time.strftime('%H:%M:%S')}  {reading.seconds:6.0f} s  {run.items.total():7,} items  "
            f"{reading.resident / MIB:8.1f} MiB  {reading.tensors:,} tensors  "
            f"{len(run.failures)} wrong"
        )


def summary(run: SoakRun) -> str:
    """Return items, exceptions, errors and memory of a run."""
    lines = [f"soak, seed {run.seed}: {len(run.problems())} problems"]
    for kind, number in sorted(run.items.items()):
        lines.append(f"{number:9,} items: {kind}, {run.spent[kind]:,.0f} s")
    for kind, number in sorted(run.judge.exceptions.items()):
        lines.append(f"{number:9,} injected: {kind}")
    for dtype, part in sorted(run.judge.worst.items()):
        lines.append(f"{part:9.0%} of its limit: largest error of {dtype}")
    for reading in run.memory.readings[:1] + run.memory.readings[-1:]:
        memory = f"{reading.tensors:,} tensors, {reading.objects:,} objects of ours"
        lines.append(f"{reading.resident / MIB:9,.1f} MiB, {memory} at {reading.seconds:,.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
