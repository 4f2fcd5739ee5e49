"""The options of a Dask cluster, and its workers."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar

import torch
import typer

from h2o_prefill.cli.console import stderr
from h2o_prefill.cli.options import ModelOptions
from h2o_prefill.eval.cluster import ModelCluster


@dataclass(frozen=True)
class ClusterOptions:
    """What a command line says about a cluster."""

    PANEL: ClassVar = "Dask cluster"
    scheduler: str | None = typer.Option(
        None,
        metavar="ADDRESS",
        help="Work on the workers of this Dask scheduler, as in tcp://10.0.0.1:8786, or a file "
        "that dask scheduler --scheduler-file wrote.",
    )
    workers: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        max=1024,
        help="Work in N processes of this machine: each has its share of the threads, or "
        "--threads, and loads the model.",
    )

    @contextlib.contextmanager
    def connect(self, model: ModelOptions) -> Iterator[ModelCluster | None]:
        """Yield workers that load a model, None without any of the options."""
        if self.scheduler is None and self.workers is None:
            yield None
            return
        if None not in (self.scheduler, self.workers):
            raise ValueError("give one of --scheduler and --workers")
        if model.device != "cpu":
            raise ValueError(f"--device must be cpu with workers, got {model.device!r}")
        try:
            import distributed
        except ModuleNotFoundError as error:
            why = "--scheduler and --workers need Dask: pip install 'h2o_prefill[cluster]'"
            raise ImportError(why) from error
        # What becomes of workers is on the dashboard, and in the results where it matters.
        for name in ("distributed", "distributed.client"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        threads, file = model.threads, Path(self.scheduler or "").expanduser()
        with contextlib.ExitStack() as stack:
            if self.workers is not None:
                threads = threads or max(1, torch.get_num_threads() // self.workers)
                where: dict[str, Any] = {"address": _start_workers(self.workers)}
                stack.enter_context(where["address"])
            elif file.is_file():
                where = {"scheduler_file": str(file)}
            else:
                where = {"address": self.scheduler}
            try:
                client = stack.enter_context(distributed.Client(**where))
            except ValueError as error:
                rule = "--scheduler must be a file or an address like tcp://10.0.0.1:8786"
                raise ValueError(f"{rule}, got {self.scheduler!r}: {error}") from error
            stderr.print(f"dashboard of {len(client.nthreads())} workers: {client.dashboard_link}")
            yield ModelCluster(client, model.model, model.dtype, threads)


def _start_workers(count: int) -> Any:
    """Return a cluster of processes of this machine, which Ctrl-C does not reach.

    A terminal sends it to workers as well, which this process ends itself.
    """
    import distributed

    # Python starts this one with the first process, and then lets signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Memory is the operating system's to judge, as without Dask: a worker that pauses for lack
        # of it would never go on, since a model does not become smaller.
        return distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            memory_limit=0,
            dashboard_address="localhost:0",
            silence_logs=logging.CRITICAL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
