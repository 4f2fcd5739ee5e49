"""The option of a Dask cluster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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

    @contextlib.contextmanager
    def connect(self, model: ModelOptions) -> Iterator[ModelCluster | None]:
        """Yield workers that load a model, None without the option."""
        if self.scheduler is None:
            yield None
            return
        if model.device != "cpu":
            raise ValueError(f"--device must be cpu with workers, got {model.device!r}")
        try:
            import distributed
        except ModuleNotFoundError as error:
            why = "--scheduler needs Dask: pip install 'h2o_prefill[cluster]'"
            raise ImportError(why) from error
        # What becomes of workers is on the dashboard, and in the results where it matters.
        for name in ("distributed", "distributed.client"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        file = Path(self.scheduler).expanduser()
        where = {"scheduler_file": str(file)} if file.is_file() else {"address": self.scheduler}
        try:
            client = distributed.Client(**where)
        except ValueError as error:
            rule = "--scheduler must be a file or an address like tcp://10.0.0.1:8786"
            raise ValueError(f"{rule}, got {self.scheduler!r}: {error}") from error
        with client:
            stderr.print(f"dashboard of {len(client.nthreads())} workers: {client.dashboard_link}")
            yield ModelCluster(client, model.model, model.dtype, model.threads)
