"""The options by which commands run on a Dask cluster, and the connection that they ask for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from h2o_prefill.cli.console import say
from h2o_prefill.generation.cluster import ModelCluster


@dataclass(frozen=True)
class ClusterOptions:
    """What a command line says about a cluster."""

    scheduler: str | None = None
    scheduler_file: Path | None = None
    workers: int | None = None

    @property
    def given(self) -> bool:
        """Whether there is any of the options."""
        return self != ClusterOptions()

    @contextlib.contextmanager
    def connect(
        self, model: str, dtype: str, threads: int | None, device: str = "cpu"
    ) -> Iterator[ModelCluster | None]:
        """Yield workers that load a model, None without any of the options.

        Raises ValueError for several of them, FileNotFoundError, ImportError without Dask, and
        OSError if no scheduler answers.
        """
        if not self.given:
            yield None
            return
        if [self.scheduler, self.scheduler_file, self.workers].count(None) < 2:
            raise ValueError("give one of --scheduler, --scheduler-file and --workers")
        if device != "cpu":
            raise ValueError(f"--device must be cpu with workers, got {device!r}")
        try:
            import distributed
        except ModuleNotFoundError as error:
            raise ImportError(
                "--scheduler, --scheduler-file and --workers need Dask: "
                "pip install 'h2o_prefill[cluster]'"
            ) from error
        # What becomes of workers is on the dashboard, and in the results where it matters.
        for name in ("distributed", "distributed.client"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with contextlib.ExitStack() as stack:
            if self.workers is not None:
                threads = threads or max(1, torch.get_num_threads() // self.workers)
                # Memory is the operating system's to judge, as without Dask: a worker that pauses
                # for lack of it would never go on, since a model does not become smaller.
                with _interrupts_held():
                    local = distributed.LocalCluster(
                        n_workers=self.workers,
                        threads_per_worker=1,
                        memory_limit=0,
                        dashboard_address="localhost:0",
                        silence_logs=logging.CRITICAL,
                    )
                client = distributed.Client(stack.enter_context(local))
            elif self.scheduler_file is not None:
                file = self.scheduler_file.expanduser()
                if not file.is_file():
                    # Dask would wait for it without an end.
                    raise FileNotFoundError(f"--scheduler-file: no such file: {str(file)!r}")
                client = distributed.Client(scheduler_file=str(file))
            else:
                try:
                    client = distributed.Client(self.scheduler)
                except ValueError as error:
                    raise ValueError(
                        "--scheduler must be an address like tcp://10.0.0.1:8786, got "
                        f"{self.scheduler!r}: {error}"
                    ) from error
            stack.enter_context(client)
            say(f"dashboard of {len(client.nthreads())} workers: {client.dashboard_link}")
            yield ModelCluster(client, model, dtype, threads)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block, and from the processes that it starts for good.

    A terminal sends Ctrl-C to workers as well, which this process ends itself.
    """
    # Python starts this one with the first process, and then lets signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def add_cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a cluster to a command, which gets them as one argument, `cluster`."""

    def parameter(name: str, kind: Any, **shown: Any) -> inspect.Parameter:
        option = Annotated[kind, typer.Option(rich_help_panel="Dask cluster", **shown)]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option
        )

    added = {
        "scheduler": parameter(
            "scheduler",
            str | None,
            metavar="ADDRESS",
            help="Work on the workers of this Dask scheduler, as in tcp://10.0.0.1:8786.",
        ),
        "scheduler_file": parameter(
            "scheduler_file",
            Path | None,
            metavar="FILE",
            help="The same, by the file that dask scheduler --scheduler-file wrote.",
        ),
        "workers": parameter(
            "workers",
            int | None,
            metavar="N",
            min=1,
            max=1024,
            help="Work in N processes of this machine: each has its share of the threads, or "
            "--threads, and loads the model.",
        ),
    }

    @functools.wraps(command)
    def with_cluster(**given: Any) -> None:
        command(cluster=ClusterOptions(*(given.pop(name) for name in added)), **given)

    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "cluster"]
    # What takes all other options stays last.
    rest = [own.pop()] if own[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    with_cluster.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *added.values(), *rest]
    )
    return with_cluster
