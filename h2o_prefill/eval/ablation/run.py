"""Perplexity over a grid of settings, shared by any number of processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation import table
from h2o_prefill.eval.ablation.cells import find_cells
from h2o_prefill.eval.ablation.claims import Claims
from h2o_prefill.eval.ablation.grid import Grid, build_grid, describe
from h2o_prefill.eval.ablation.store import CSV_NAME, AblationStore
from h2o_prefill.eval.environment import commit, cpu_name, gpu_name
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.text import Corpus, load_text
from h2o_prefill.eval.perplexity.windows import parse_windows
from h2o_prefill.eval.runs import check_model, eval_mode

if TYPE_CHECKING:
    import pandas as pd

    from h2o_prefill.eval.runs import Progress


def run_ablation(
    model: nn.Module | str,
    axes: Mapping[str, Sequence[Any]],
    output: str | os.PathLike[str] = "benchmark_results",
    *,
    base: PrefillConfig | str | Sequence[PrefillConfig | str] | None = None,
    datasets: Sequence[str | Corpus] = ("wikitext2",),
    contexts: Sequence[int] = (4096,),
    windows: str = "0:6",
    protocol: str = "gptq",
    tokenizer: Any = None,
    dtype: str = "float32",
    model_name: str | None = None,
    lease_seconds: float = 60.0,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure the perplexity of every combination of settings, each beside the same dense run.

    Finished cells are kept: in `output`, perplexity_ablation.csv holds every cell that any run has
    finished (`ablation.table` has its columns), and is whole at any time. A run that was stopped
    goes on when it is called again, a larger grid adds its new cells, and several processes with
    one `output`, on one machine or on many that share the folder, share the cells of a grid: each
    runs once, and those of a process that died are taken over. Under `torchrun` or `accelerate
    launch` each rank starts at a place of its own.

    A dense run is made once a window and kept in the folder perplexity_ablation_parts beside the
    CSV file, as hidden states (or as logits, far larger, of models whose output layer does more
    than multiply). That folder may be deleted when nothing runs.

    Parameters
    ----------
    model : nn.Module or str
        A transformers model with dense attention, or a name that `load_model` knows.
    axes : mapping of str to sequence
        Values of fields of `PrefillConfig`, to be combined.
    output : path
        Folder for the CSV file; made if it is not there.
    base : PrefillConfig or str, or a sequence of them, optional
        Settings of the fields that `axes` does not name; each of several is combined with all
        values.
        Default: that of `enable`.
    datasets : sequence of str or Corpus
        Texts, or names that `load_text` knows.
    contexts : sequence of int
        Tokens of a window. Combinations of fewer than two chunks are left out.
    windows, protocol : str
        As `evaluate_perplexity` takes them.
    tokenizer : optional
        The model's. A model given by name brings its own.
    dtype : str
        Data type of the weights of a model given by name.
    model_name : str, optional
        Name in the table. Default: the name given, or that in the model's config.
    lease_seconds : float
        The time without a sign of life after which another process takes over the cell of one; the
        same for all.
    on_progress : callable, optional
        Called with (windows done by all processes, windows in all, what runs next).

    Returns
    -------
    pandas.DataFrame
        The rows of this grid, when all are finished.

    Raises
    ------
    ValueError
        If an argument is out of its range, no combination can be run, a text is too short, or the
        model already runs sparsely.
    RuntimeError
        If cells failed in this process and no other one finished them. The others are finished.

    Warns
    -----
    UserWarning
        Of combinations that cannot be run and are left out, of memory sets that are not smaller
        than a chunk, of rows that another version of this package wrote, and of cells that fail.
    """
    from h2o_prefill.eval.ablation.worker import AblationWorker

    grid = build_grid(axes, contexts, base, protocol)
    parse_windows(windows)
    rank, world_size = worker_rank()
    if not lease_seconds > 0:
        raise ValueError(f"lease_seconds must be > 0, got {lease_seconds}")
    folder = _checked_folder(output)
    corpora = _corpora(datasets)
    _warn_of_grid(grid)
    # A file that is no such table shows before the work.
    table.read_rows(folder / CSV_NAME)
    network, tokenizer = _loaded(model, tokenizer, dtype)
    check_model(network, max(context for context, _ in grid.combinations), "contexts")
    _check_configs(network, grid)
    cells = find_cells(grid, corpora, network, tokenizer, windows, protocol)
    store = AblationStore(folder)
    origin = _origin(network, model if isinstance(model, str) else model_name)
    keys = {cell.key for cell in cells}
    _warn_of_versions([row for key, row in store.rows().items() if key in keys], origin)
    start = rank * len(cells) // world_size
    with torch.no_grad(), eval_mode(network):
        worker = AblationWorker(
            network,
            cells[start:] + cells[:start],
            store,
            Claims(store.claims_folder, lease_seconds),
            protocol=protocol,
            origin=origin,
            on_progress=on_progress,
        )
        worker.run()
    rows = store.rows()
    failed = [cell for cell in cells if cell.key not in rows]
    if failed:
        error = worker.failed[failed[0].key]
        raise RuntimeError(
            f"{len(failed)} of {len(cells)} cells failed, the others are in {store.csv_path}; "
            f"first {failed[0].label}: {error}"
        ) from error
    return table.to_frame(rows[key] for key in keys)


def worker_rank() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE, as `torchrun` and `accelerate launch` set them; else 0 and 1.

    Raises
    ------
    ValueError
        If they are not numbers, or the rank is not within 0 .. WORLD_SIZE - 1.
    """
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise ValueError(f"RANK must be a number below WORLD_SIZE, got {rank!r} and {world_size!r}")
    return int(rank), int(world_size)


def _checked_folder(output: str | os.PathLike[str]) -> Path:
    folder = Path(output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(folder)!r}")
    return folder


def _corpora(datasets: Sequence[str | Corpus]) -> list[Corpus]:
    if isinstance(datasets, str) or not datasets:
        raise ValueError(f"datasets must be a sequence of at least one text, got {datasets!r}")
    return [name if isinstance(name, Corpus) else load_text(name) for name in datasets]


def _loaded(model: nn.Module | str, tokenizer: Any, dtype: str) -> tuple[Any, Any]:
    if not isinstance(model, str) and tokenizer is None:
        raise ValueError("a tokenizer must be given with a model that is not given by its name")
    return resolve_model(model, tokenizer, dtype)


def _check_configs(network: Any, grid: Grid) -> None:
    """Refuse settings that do not fit the model, before the work and not in the middle of it."""
    from h2o_prefill.hf import enable

    for config in dict.fromkeys(config for _, config in grid.combinations):
        enable(network, config).disable()


def _origin(network: nn.Module, name: str | None) -> dict[str, Any]:
    weight = next(network.parameters())
    own_name = getattr(getattr(network, "config", None), "name_or_path", "")
    return {
        "model": name or own_name or type(network).__name__,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "hardware": gpu_name() if weight.device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "version": h2o_prefill.__version__,
        "commit": commit(),
    }


def _warn_of_grid(grid: Grid) -> None:
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for values, reason in grid.refused:
        by_reason.setdefault(reason, []).append(values)
    for reason, refused in by_reason.items():
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        warnings.warn(f"left out {describe(refused[0])}{more}: {reason}", stacklevel=3)
    large = sum(config.memory_size >= config.chunk_size for _, config in grid.combinations)
    if large:
        warnings.warn(
            f"in {large} of {len(grid.combinations)} combinations the memory set is not smaller "
            "than chunk_size: sparse prefill saves less than it could",
            stacklevel=3,
        )


def _warn_of_versions(rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> None:
    def version(row: Mapping[str, Any]) -> tuple[Any, str]:
        # With or without changes, as "+" says: the table itself is a change of a checkout.
        commit_of = row["commit"]
        return row["version"], commit_of.rstrip("+") if isinstance(commit_of, str) else ""

    others = sum(version(row) != version(origin) for row in rows)
    if others:
        warnings.warn(
            f"{others} of the cells were finished by another version of this package and are "
            "kept; another output folder measures them again",
            stacklevel=3,
        )
