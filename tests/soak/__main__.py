"""Mixed prompts for a long time: no wrong result, and memory flat.

    python tests/soak --minutes 30 --seed 1

The exit code is 0 if all is well. `--item` repeats one item that went wrong.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

# Threads that wait sleep: others may use the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import typer
from soak.soak_run import MIB, Reading, SoakRun, fill_caches


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long to run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other items.")] = 0,
    item: Annotated[int | None, typer.Option(help="Run just the item of this seed.")] = None,
) -> None:
    """Run random prompts through the operators, contexts and models, and watch memory."""
    run = SoakRun(seed, 60 * minutes)

    def say(reading: Reading) -> None:
        """Print a line for every sixth reading, which is a minute."""
        if len(run.readings) % 6 == 1:
            typer.echo(
                f"{reading.seconds:6.0f} s  {run.items.total():7,} items  "
                f"{reading.resident / MIB:8.1f} MiB  {reading.tensors:,} tensors  "
                f"{len(run.failures)} wrong"
            )

    if item is not None:
        run.run_item(item)
        problems = run.failures
    else:
        fill_caches()
        problems = run.run(say)
    typer.echo("\n".join([*problems, f"{len(problems)} problems, {dict(run.items)}"]))
    raise typer.Exit(int(bool(problems)))


if __name__ == "__main__":
    typer.run(main)
