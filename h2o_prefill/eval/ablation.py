"""Perplexity over a grid of settings."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import h2o_prefill
from h2o_prefill._errors import first_line
from h2o_prefill._warn import warn
from h2o_prefill.config import AUTO, PrefillConfig, format_value
from h2o_prefill.eval import ablation_table as table
from h2o_prefill.eval.ablation_table import FIELDS
from h2o_prefill.eval.cluster import LoadedModel, ModelCluster, run_pieces
from h2o_prefill.eval.perplexity import PairedRuns, check_settings
from h2o_prefill.eval.report import commit, cpu_name, gpu_name, output_folder
from h2o_prefill.fingerprint import digest, fingerprint
from h2o_prefill.generation.models import resolve_model
from h2o_prefill.generation.runs import (
    FAILURES,
    Progress,
    check_model,
    count_steps,
    eval_mode,
    prefill_mode,
    report_progress,
    sparse_at_any_length,
)
from h2o_prefill.generation.text import Corpus, encode, load_text, parse_windows, select_windows

if TYPE_CHECKING:
    import pandas as pd


def build_grid(
    axes: Mapping[str, Sequence[Any]],
    contexts: Sequence[int],
    bases: Sequence[PrefillConfig],
) -> list[tuple[int, PrefillConfig]]:
    """Combine values, as `run_ablation` takes them, into tokens of a window and settings.

    `bases` are settings of the fields that `axes` does not name.

    Warns of combinations that cannot be run. Combinations that differ only in fields of recall
    count once where recall is 0.
    """
    values = {"contexts": _distinct("contexts", contexts)}
    for context in values["contexts"]:
        if not isinstance(context, int) or context < 1:
            raise ValueError(f"contexts must be >= 1 and ints, got {context!r}")
    for name, choices in axes.items():
        if name not in FIELDS:
            raise ValueError(f"axes must be fields of PrefillConfig, {FIELDS}, got {name!r}")
        values[name] = _distinct(name, choices)
    grid: dict[tuple[int, PrefillConfig], None] = {}
    refused: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        # A budget that is not smaller than a chunk is one more value of the grid here.
        warnings.simplefilter("ignore", UserWarning)
        for name in axes:
            for value in values[name]:
                PrefillConfig(**{name: value})
        for one, context, *settings in itertools.product(
            _distinct("base", bases), *values.values()
        ):
            changes = dict(zip(axes, settings, strict=True))
            try:
                config = one.with_fields(**changes)
                check_settings(config, context, "0:1")
            except ValueError as error:
                described = {"context": context, **changes}.items()
                text = " ".join(f"{name}={format_value(value)}" for name, value in described)
                refused.setdefault(str(error), []).append(text)
            else:
                if not config.recall:  # then these have no effect
                    config = config.replace(recall_characters=PrefillConfig.recall_characters)
                grid[context, config] = None
    if not grid:
        raise ValueError(f"the grid must hold a combination that can be run: {next(iter(refused))}")
    for reason, left_out in refused.items():
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        warn(f"left out {left_out[0]}{more}: {reason}")
    return list(grid)


def parse_values(name: str, text: str) -> list[Any]:
    """Read comma-separated values of a field, each written as in a settings text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        settings = [PrefillConfig.parse(f"h2o,{name}={part.strip()}") for part in text.split(",")]
    return [getattr(config, name) for config in settings]


def _distinct(name: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ValueError(f"{name} must be a sequence of at least one value, got {values!r}")
    return list(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values))


def run_ablation(
    model: nn.Module | str,
    axes: Mapping[str, Sequence[Any]],
    output: str | os.PathLike[str] = "benchmark_results",
    *,
    base: PrefillConfig | str | Sequence[PrefillConfig | str] | None = None,
    datasets: Sequence[str | Corpus] = ("wikitext2",),
    contexts: Sequence[int] = (4096,),
    windows: str = "0:6",
    tokenizer: Any = None,
    model_name: str | None = None,
    cluster: ModelCluster | None = None,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure the perplexity of every combination of settings against the same dense run.

    Every combination on one text at one context is a cell. The row of a finished cell is added to
    perplexity_ablation.csv in `output` at once (`ablation_table` describes its columns), and cells
    that have a row are skipped: a run that was stopped resumes when it is called again. Each window
    is run densely once; the hidden states of one text at one context stay in memory.

    Parameters
    ----------
    axes : mapping of str to sequence
        Values of fields of `PrefillConfig`, to be combined.
    output : path
        Folder for the CSV file; it is created if necessary. Rows of another version of this
        package, which a column names, are kept: another folder measures their cells again.
    base : PrefillConfig or str, or a sequence of them, optional
        Settings of the fields that `axes` does not name; each of several is combined with all
        values. Default: the settings that `enable` takes.
    datasets : sequence of str or Corpus
        Texts.
    contexts : sequence of int
        Tokens of a window. Combinations with fewer than two chunks are left out.
    model_name : str, optional
        Name in the table. Default: the name given, or the one in the model's config.
    cluster : ModelCluster, optional
        Workers that measure the cells; the table is written here. Each of them runs the windows
        densely once.
    model, windows, tokenizer, on_progress
        As in `h2o_prefill.eval`.

    Returns
    -------
    pandas.DataFrame
        The rows of this grid.

    Raises
    ------
    RuntimeError
        If cells failed. All others are finished.

    Warns
    -----
    UserWarning
        About combinations that cannot be run and are left out, and cells that fail.
    """
    parse_windows(windows)
    folder = output_folder(output, "output")
    if isinstance(datasets, str) or not datasets:
        raise ValueError(f"datasets must be a sequence of at least one text, got {datasets!r}")
    corpora = [name if isinstance(name, Corpus) else load_text(name) for name in datasets]
    path = folder / table.CSV_NAME
    rows = table.read_rows(path)
    network, tokenizer = resolve_model(model, tokenizer)
    bases = [base] if base is None or isinstance(base, (PrefillConfig, str)) else base
    chosen = [sparse_at_any_length(one) for one in bases]
    grid = build_grid(axes, contexts, chosen)
    check_model(network, max(context for context, _ in grid), "contexts")
    for config in dict.fromkeys(config for _, config in grid):
        with prefill_mode(network, config):
            pass  # raises where settings do not fit the model
    texts, cells = _find_cells(grid, corpora, network, tokenizer, windows)
    name = model if isinstance(model, str) else model_name
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {key: cell for key, cell in cells.items() if key not in rows}
    # Each window dense, where a cell needs it, and sparse once a cell.
    total = len(pieces)
    if cluster is None:
        needed = [number for number, _ in pieces.values()]
        total = sum(len(texts[number].batches) for number in [*needed, *set(needed)])
    loaded = LoadedModel(network, tokenizer, count_steps(on_progress, total))
    shared = name, texts
    failed: dict[str, Exception] = {}
    for key, result in run_pieces(loaded, cluster, _measure_cell, shared, pieces):
        number, config = pieces[key]
        try:
            measured = result()
        except FAILURES as error:
            cell = texts[number].cell_name(config)
            why = f"{cell}: {first_line(error)}"
            failed[why] = error
            warn(f"a cell failed, {why}")
        else:
            named = config, config.with_min_prefill(config.min_prefill or AUTO)
            measured["preset"] = min((x.to_string() for x in named), key=len)
            rows[key] = {"cell": key, **measured}
            table.add_row(rows[key], path)
    report_progress(on_progress, total, total, "done")
    if failed:
        first, cause = next(iter(failed.items()))
        raise RuntimeError(
            f"{len(failed)} of {len(cells)} cells failed, the others are in {path}; first {first}"
        ) from cause
    return table.to_frame(rows[key] for key in cells)


class _Text(NamedTuple):
    """The windows of a text at one context."""

    key: str  # digest of the windows and their tokens
    columns: dict[str, str]  # of all its rows
    indices: range
    batches: Tensor

    def cell_name(self, config: PrefillConfig) -> str:
        return f"{self.columns['dataset']} {self.batches.shape[1]} {config.to_string()}"


# The number of a text, and settings.
_Cell = tuple[int, PrefillConfig]


def _measure_cell(
    loaded: LoadedModel,
    shared: tuple[str | None, list[_Text]],
    piece: _Cell,
) -> dict[str, Any]:
    """Return the row of a cell without its key; the next cell of a text has its dense runs."""
    name, texts = shared
    number, config = piece
    text, network = texts[number], loaded.network
    cell = text.cell_name(config)

    def begin() -> tuple[PairedRuns, dict[str, Any]]:
        windows = loaded.tokenizer, text.indices, text.batches
        return PairedRuns(network, *windows, keep_dense=True), _origin(network, name)

    with torch.no_grad(), eval_mode(network):
        runs, origin = loaded.once(f"{text.key} {name}", begin)
        result = runs.evaluate(
            config, lambda index, what: loaded.step(what if what == "dense" else cell)
        )
    return {**table.measures(result), **origin, **text.columns}


def _find_cells(
    grid: Sequence[tuple[int, PrefillConfig]],
    corpora: Sequence[Corpus],
    network: nn.Module,
    tokenizer: Any,
    windows: str,
) -> tuple[list[_Text], dict[str, _Cell]]:
    """Return each text at each context, and all cells by key."""
    weights = fingerprint(network)
    texts: list[_Text] = []
    cells: dict[str, _Cell] = {}
    for corpus in corpora:
        tokens = encode(tokenizer, corpus.text)
        for context in dict.fromkeys(context for context, _ in grid):
            indices, batches = select_windows(tokens, context, windows)
            digests = [str(indices.start), *(digest(weights, ids) for ids in batches)]
            for config in (config for length, config in grid if length == context):
                # Without the fields at their defaults: a new field leaves old keys as they are.
                values = {n: getattr(config, n) for n in FIELDS}
                changed = {n: x for n, x in values.items() if x != getattr(PrefillConfig, n)}
                key = digest(corpus.name, *digests, str(sorted(changed.items())))
                cells[key] = len(texts), config
            span = f"{indices.start}:{indices.stop}"
            columns = {"dataset": corpus.name, "text_source": corpus.source, "windows": span}
            texts.append(_Text(digest(*digests), columns, indices, batches))
    return texts, cells


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
