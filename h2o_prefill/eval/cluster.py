"""Pieces of work that do not depend on each other: in this process, or on the workers of Dask.

A piece is a function of a loaded model and of values that can be pickled. Dask keeps what is to be
done: the pieces of a worker that dies run elsewhere, and nothing here needs to know.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import h2o_prefill
from h2o_prefill.fingerprint import fingerprint
from h2o_prefill.generation.models import load_model

if TYPE_CHECKING:
    from distributed import Client

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

# `enable` and numbers of threads belong to a process, not to a thread of it.
_ONE_PIECE = threading.Lock()


@dataclass
class LoadedModel:
    """A model as pieces get it."""

    network: Any
    tokenizer: Any
    step: Callable[[str], None] = lambda what: None  # to call before each step of the work
    _last: tuple[str, Any] = field(default=("", None), repr=False)

    def once(self, key: str, make: Callable[[], R]) -> R:
        """Return what the last piece made under this key; another key drops it."""
        if self._last[0] != key:
            self._last = "", None  # frees its memory first
            self._last = key, make()
        made: R = self._last[1]
        return made


@dataclass(frozen=True)
class ModelCluster:
    """Workers of a Dask cluster; each loads the same model once.

    A worker runs one piece at a time, however many threads Dask gives it.

    Parameters
    ----------
    client : distributed.Client
        A connection to the cluster.
    model, dtype : str
        As `load_model` takes them. A folder must be at the same path on every worker.
    threads : int, optional
        CPU threads of each worker. Default: its own number. Results are equal to the bit only
        with the same number on the same kind of processor.
    """

    client: Client
    model: str
    dtype: str = "float32"
    threads: int | None = None


def run_pieces(
    loaded: LoadedModel,
    cluster: ModelCluster | None,
    function: Callable[..., R],
    shared: Any,
    pieces: Mapping[K, Any],
) -> Iterator[tuple[K, Callable[[], R]]]:
    """Run `function(model, shared, piece)` for each piece; yield keys and their results.

    A result is a function, which returns it or raises the error of its piece alone: RuntimeError
    for a piece on which several workers died. Without a cluster the piece runs in that call, in
    order; on a cluster they come as they finish, and `loaded.step` is called once for each.

    Raises ValueError in a result if a worker has another version of this package or another model,
    and ConnectionError if the scheduler was lost.
    """
    if cluster is None:
        for key, piece in pieces.items():
            yield key, partial(function, loaded, shared, piece)
        return
    from distributed import as_completed

    model = cluster.model, cluster.dtype, h2o_prefill.__version__, fingerprint(loaded.network)
    submit = partial(cluster.client.submit, pure=False)
    # A task like the others, not scattered data: Dask makes it again if its worker dies.
    common = submit(_same, shared)
    futures = {
        submit(_work, model, cluster.threads, function, common, piece): key
        for key, piece in pieces.items()
    }
    # What is left when the caller stops is released with these futures.
    finished = as_completed(futures)
    while futures:
        loaded.step(f"{len(futures)} left on the cluster")
        future = next(finished)
        yield futures.pop(future), partial(_result, future)


def _same(value: R) -> R:
    return value


def _work(
    model: tuple[str, ...], threads: int | None, function: Callable[..., R], shared: Any, piece: Any
) -> R:
    """Run a piece on a worker."""
    with _ONE_PIECE:
        if threads is not None:
            # OpenMP counts by thread, and Dask may take another one for every piece.
            torch.set_num_threads(threads)
        return function(_load(*model), shared, piece)


@functools.lru_cache(maxsize=1)
def _load(model: str, dtype: str, version: str, expected: str) -> LoadedModel:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    host = f"the worker on {socket.gethostname()}"
    if h2o_prefill.__version__ != version:
        raise ValueError(f"{host} must have h2o_prefill {version}, has {h2o_prefill.__version__}")
    try:
        loaded = LoadedModel(*load_model(model, dtype))
    except (ValueError, OSError, ImportError) as error:
        raise ValueError(f"{host} cannot load the model: {error}") from error
    if fingerprint(loaded.network) != expected:
        raise ValueError(f"{host} must have the same model, has different weights from {model!r}")
    return loaded


def _result(future: Any) -> Any:
    """Return the result of a finished future of `_work`."""
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        why = "several workers died on it, for lack of memory or since they were killed"
        raise RuntimeError(why) from error
    except CancelledError as error:
        raise ConnectionError("the scheduler of the cluster was lost") from error
