"""Perplexity over a grid of settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation import table
from h2o_prefill.eval.ablation.grid import Grid, build_grid, describe, label
from h2o_prefill.eval.environment import commit, cpu_name, gpu_name
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.text import Corpus, encode, load_text
from h2o_prefill.eval.perplexity.evaluate import PairedRuns
from h2o_prefill.eval.perplexity.windows import first_token, parse_windows, select_windows
from h2o_prefill.eval.runs import check_model, eval_mode, report_progress

if TYPE_CHECKING:
    import pandas as pd

    from h2o_prefill.eval.runs import Progress

# Errors of single cells: too little memory, logits that are not finite.
_FAILURES = (RuntimeError, ArithmeticError, MemoryError)


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
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure the perplexity of every combination of settings, each beside the same dense run.

    Every combination on one text at one context is a cell. The row of a finished cell is added to
    perplexity_ablation.csv in `output` at once (`ablation.table` describes its columns), and cells
    that have a row are skipped: a run that was stopped resumes when it is called again, and a
    larger grid computes only its new cells. Each window is run densely once; the hidden states (or
    the logits, of models whose output layer does more than multiply) of one text at one context are
    kept in memory.

    Parameters
    ----------
    model : nn.Module or str
        A transformers model with dense attention, or a name that `load_model` knows.
    axes : mapping of str to sequence
        Values of fields of `PrefillConfig`, to be combined.
    output : path
        Folder for the CSV file; it is created if necessary.
    base : PrefillConfig or str, or a sequence of them, optional
        Settings of the fields that `axes` does not name; each of several is combined with all
        values. Default: that of `enable`.
    datasets : sequence of str or Corpus
        Texts, or names that `load_text` knows.
    contexts : sequence of int
        Tokens of a window. Combinations with fewer than two chunks are left out.
    windows, protocol : str
        As `evaluate_perplexity` takes them.
    tokenizer : optional
        The model's. A model given by name brings its own.
    dtype : str
        Data type of the weights of a model given by name.
    model_name : str, optional
        Name in the table. Default: the name given, or that in the model's config.
    on_progress : callable, optional
        Called with (forward passes done, passes in all, what runs next).

    Returns
    -------
    pandas.DataFrame
        The rows of this grid.

    Raises
    ------
    ValueError
        If an argument is out of its range, no combination can be run, a text is too short, or the
        model already runs sparsely.
    RuntimeError
        If cells failed. All others are finished.

    Warns
    -----
    UserWarning
        About combinations that cannot be run and are left out, memory sets that are not smaller
        than a chunk, rows that another version of this package wrote, and cells that fail.
    """
    grid = build_grid(axes, contexts, base, protocol)
    parse_windows(windows)
    folder = Path(output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(folder)!r}")
    if isinstance(datasets, str) or not datasets:
        raise ValueError(f"datasets must be a sequence of at least one text, got {datasets!r}")
    corpora = [name if isinstance(name, Corpus) else load_text(name) for name in datasets]
    _warn_of_grid(grid)
    path = folder / table.CSV_NAME
    rows = {str(row["cell"]): row for row in table.read_rows(path)}
    if not isinstance(model, str) and tokenizer is None:
        raise ValueError("a tokenizer must be given with a model that is not given by its name")
    network, tokenizer = resolve_model(model, tokenizer, dtype)
    check_model(network, max(context for context, _ in grid.combinations), "contexts")
    _check_configs(network, grid)
    found = _find_cells(grid, corpora, network, tokenizer, windows, protocol)
    keys = [key for text in found for key in text.configs]
    origin = _origin(network, model if isinstance(model, str) else model_name)
    _warn_of_versions([rows[key] for key in keys if key in rows], origin)
    folder.mkdir(parents=True, exist_ok=True)
    table.begin_csv(path)
    for text in found:
        text.configs = {key: one for key, one in text.configs.items() if key not in rows}
    # Each window dense, where a cell needs it, and sparse once a cell.
    total = sum(len(text.batches) * (len(text.configs) + 1) for text in found if text.configs)
    done = 0
    failed: dict[str, Exception] = {}
    with torch.no_grad(), eval_mode(network):
        for text in found:
            runs = PairedRuns(network, text.indices, text.batches, protocol, keep_dense=True)
            for key, config in text.configs.items():
                name = label(grid, text.batches.shape[1], config)
                name = f"{text.corpus.name} {name}" if len(corpora) > 1 else name

                def step(index: int, what: str, name: str = name) -> None:
                    nonlocal done
                    report_progress(on_progress, done, total, what if what == "dense" else name)
                    done += 1

                try:
                    result = runs.evaluate(config, step)
                except _FAILURES as error:
                    failed[f"{name}: {error}"] = error
                    warnings.warn(f"a cell failed, {name}: {error}", stacklevel=2)
                    continue
                rows[key] = {"cell": key, **origin, **text.columns(), **table.measures(result)}
                table.append_row(rows[key], path)
    report_progress(on_progress, total, total, "done")
    if failed:
        first, cause = next(iter(failed.items()))
        raise RuntimeError(
            f"{len(failed)} of {len(keys)} cells failed, the others are in {path}; first {first}"
        ) from cause
    return table.to_frame(rows[key] for key in keys)


@dataclass
class _Text:
    """The windows of a text at one context, and the settings of its cells by their keys."""

    corpus: Corpus
    indices: range
    batches: Tensor
    configs: dict[str, PrefillConfig]

    def columns(self) -> dict[str, Any]:
        span = f"{self.indices.start}:{self.indices.stop}"
        return {"dataset": self.corpus.name, "text_source": self.corpus.source, "windows": span}


def _find_cells(
    grid: Grid,
    corpora: Sequence[Corpus],
    network: nn.Module,
    tokenizer: Any,
    windows: str,
    protocol: str,
) -> list[_Text]:
    weights = _fingerprint(network)
    first = first_token(tokenizer, protocol)
    found = []
    for corpus in corpora:
        tokens = encode(tokenizer, corpus.text)
        for context in dict.fromkeys(context for context, _ in grid.combinations):
            indices, batches = select_windows(tokens, context, windows, first)
            digests = [indices.start, *(_digest(weights, ids.tolist()) for ids in batches)]
            configs = {
                _digest(corpus.name, protocol, digests, _changed(config)): config
                for length, config in grid.combinations
                if length == context
            }
            found.append(_Text(corpus, indices, batches, configs))
    return found


def _check_configs(network: Any, grid: Grid) -> None:
    """Refuse settings that do not fit the model before the work begins."""
    from h2o_prefill.hf import enable

    for config in dict.fromkeys(config for _, config in grid.combinations):
        enable(network, config).disable()


def _changed(config: PrefillConfig) -> dict[str, Any]:
    """Return the fields that are not at their defaults: a new field leaves old keys as they are."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }


def _fingerprint(model: nn.Module) -> str:
    """Return a digest of the first numbers of each parameter: reading all would take too long."""
    return _digest(
        *(
            (name, str(weight.dtype), list(weight.shape), weight.detach().flatten()[:4].tolist())
            for name, weight in model.named_parameters()
        )
    )


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


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
        # "+" is ignored: the table itself may be a change of the checkout.
        commit_of = row["commit"]
        return row["version"], commit_of.rstrip("+") if isinstance(commit_of, str) else ""

    others = sum(version(row) != version(origin) for row in rows)
    if others:
        warnings.warn(
            f"{others} of the cells were finished by another version of this package and are "
            "kept; another output folder measures them again",
            stacklevel=3,
        )
