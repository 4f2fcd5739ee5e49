"""Perplexity over a grid of settings."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import h2o_prefill
from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation import table
from h2o_prefill.eval.ablation.grid import FIELDS, build_grid
from h2o_prefill.eval.environment import commit, cpu_name, gpu_name
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.text import Corpus, encode, load_text
from h2o_prefill.eval.perplexity.evaluate import PairedRuns
from h2o_prefill.eval.perplexity.windows import first_token, parse_windows, select_windows
from h2o_prefill.eval.runs import check_model, eval_mode, prefill_mode, report_progress

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
    """Measure the perplexity of every combination of settings against the same dense run.

    Every combination on one text at one context is a cell. The row of a finished cell is added to
    perplexity_ablation.csv in `output` at once (`ablation.table` describes its columns), and cells
    that have a row are skipped: a run that was stopped resumes when it is called again, and a
    larger grid computes only its new cells. Each window is run densely once; the hidden states of
    one text at one context (or the logits, if the output layer is more than a product) are kept in
    memory.

    Parameters
    ----------
    model : nn.Module or str
        A transformers model with dense attention, or a name that `load_model` knows.
    axes : mapping of str to sequence
        Values of fields of `PrefillConfig`, to be combined.
    output : path
        Folder for the CSV file; it is created if necessary. Rows of another version of this
        package, which a column names, are kept: another folder measures their cells again.
    base : PrefillConfig or str, or a sequence of them, optional
        Settings of the fields that `axes` does not name; each of several is combined with all
        values. Default: the preset "recommended".
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
        About combinations that cannot be run and are left out, and cells that fail.
    """
    grid = build_grid(axes, contexts, base, protocol)
    parse_windows(windows)
    folder = Path(output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(folder)!r}")
    if isinstance(datasets, str) or not datasets:
        raise ValueError(f"datasets must be a sequence of at least one text, got {datasets!r}")
    corpora = [name if isinstance(name, Corpus) else load_text(name) for name in datasets]
    path = folder / table.CSV_NAME
    rows = {str(row["cell"]): row for row in table.read_rows(path)}
    network, tokenizer = resolve_model(model, tokenizer, dtype)
    check_model(network, max(context for context, _ in grid), "contexts")
    for config in dict.fromkeys(config for _, config in grid):
        with prefill_mode(network, config):  # raises where settings do not fit the model
            pass
    texts = _find_cells(grid, corpora, network, tokenizer, windows, protocol)
    keys = [key for text in texts for key in text.configs]
    origin = _origin(network, model if isinstance(model, str) else model_name)
    folder.mkdir(parents=True, exist_ok=True)
    table.begin_csv(path, rows.values())
    for text in texts:
        text.configs = {key: one for key, one in text.configs.items() if key not in rows}
    # Each window dense, where a cell needs it, and sparse once a cell.
    total = sum(len(text.batches) * (len(text.configs) + 1) for text in texts if text.configs)
    steps = itertools.count()
    failed: dict[str, Exception] = {}
    with torch.no_grad(), eval_mode(network):
        for text in texts:
            runs = PairedRuns(
                network, tokenizer, text.indices, text.batches, protocol, keep_dense=True
            )
            place = f"{text.columns['dataset']} {text.batches.shape[1]}"
            for key, config in text.configs.items():
                name = f"{place} {config.to_string()}"

                def step(index: int, what: str, name: str = name) -> None:
                    now = what if what == "dense" else name
                    report_progress(on_progress, next(steps), total, now)

                try:
                    result = runs.evaluate(config, step)
                except _FAILURES as error:
                    failed[f"{name}: {error}"] = error
                    warn(f"a cell failed, {name}: {error}")
                    continue
                rows[key] = {"cell": key, **table.measures(result), **origin, **text.columns}
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

    columns: dict[str, str]  # of all its rows
    indices: range
    batches: Tensor
    configs: dict[str, PrefillConfig]


def _find_cells(
    grid: Sequence[tuple[int, PrefillConfig]],
    corpora: Sequence[Corpus],
    network: nn.Module,
    tokenizer: Any,
    windows: str,
    protocol: str,
) -> list[_Text]:
    # The first numbers of each parameter: reading all would take too long.
    weights = _digest(
        *(
            (name, str(weight.dtype), list(weight.shape), weight.detach().flatten()[:4].tolist())
            for name, weight in network.named_parameters()
        ),
        *_scaled_positions(network),
    )
    first = first_token(tokenizer, protocol)
    found = []
    for corpus in corpora:
        tokens = encode(tokenizer, corpus.text)
        for context in dict.fromkeys(context for context, _ in grid):
            indices, batches = select_windows(tokens, context, windows, first)
            digests = [indices.start, *(_digest(weights, ids.tolist()) for ids in batches)]
            configs = {
                _digest(corpus.name, protocol, digests, _changed(config)): config
                for length, config in grid
                if length == context
            }
            span = f"{indices.start}:{indices.stop}"
            columns = {"dataset": corpus.name, "text_source": corpus.source, "windows": span}
            found.append(_Text(columns, indices, batches, configs))
    return found


def _scaled_positions(network: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of scaled position embeddings, which weights do not show."""
    rope = getattr(getattr(network, "config", None), "rope_parameters", None) or {}
    return [] if rope.get("rope_type", "default") == "default" else [rope]


def _changed(config: PrefillConfig) -> dict[str, Any]:
    """Return the fields that are not at their defaults: a new field leaves old keys as they are."""
    values = {name: getattr(config, name) for name in FIELDS}
    return {name: value for name, value in values.items() if value != getattr(PrefillConfig, name)}


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
