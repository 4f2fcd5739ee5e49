"""The table of an ablation, one row a cell: its columns, and its CSV file.

A cell is one `PrefillConfig` on one text at one context.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.eval.perplexity import PerplexityResult

if TYPE_CHECKING:
    import pandas as pd

FIELDS = [field.name for field in dataclasses.fields(PrefillConfig)]

CSV_NAME = "perplexity_ablation.csv"

_TEXT, _WHOLE, _REAL = "string", "Int64", "float64"

# Layers are joined by "+" or "none"; an empty min_prefill is one chunk; recall_* are at their
# defaults if recall is 0.
_SETTINGS = {
    field.name: _WHOLE if str(field.type).startswith("int") else _TEXT
    for field in dataclasses.fields(PrefillConfig)
}

# The type of each column, as pandas names it.
COLUMNS: dict[str, str] = {
    "cell": _TEXT,  # digest of weights, tokens and settings: the same cell, the same row
    "model": _TEXT,
    "dtype": _TEXT,  # of the weights
    "dataset": _TEXT,
    "text_source": _TEXT,  # where the text came from
    "context": _WHOLE,  # tokens of a window
    "windows": _TEXT,  # slice "begin:end" of the windows of the text, which do not overlap
    # A settings text: a preset and what differs from it.
    "preset": _TEXT,
    **_SETTINGS,
    "scored_tokens": _WHOLE,  # of all windows
    "dense_ppl": _REAL,  # perplexity over them
    "sparse_ppl": _REAL,
    "delta_percent": _REAL,  # sparse perplexity above dense
    "stderr_percent": _REAL,  # standard error of delta_percent, from paired differences
    "worst_percent": _REAL,  # delta_percent of the window where it is largest
    "kl_mean": _REAL,  # mean KL(dense || sparse) of the next-token distributions, nats
    "top1_agreement": _REAL,  # share of tokens whose most likely token is the same in both runs
    "attention_flops_ratio": _REAL,  # dense over sparse, of all windows (`count_attention_flops`)
    "widening": _REAL,  # factor of L and H by errors, mean; empty if error_rows is 0
    "recalled_keys": _REAL,  # that a row sees, mean of all rows; empty if recall is 0
    "dense_seconds": _REAL,  # of the forward calls of all windows
    "sparse_seconds": _REAL,  # the same; `benchmark_throughput` measures times better
    "hardware": _TEXT,  # what the sparse run used
    "threads": _WHOLE,
    "torch": _TEXT,
    "version": _TEXT,  # of this package
    "commit": _TEXT,  # of this package, "+" if the checkout had changes
}


def measures(result: PerplexityResult) -> dict[str, Any]:
    """Return the columns of a row that come from its result."""
    settings = dataclasses.asdict(result.config)
    texts = {name: format_value(settings[name]) for name in settings if _SETTINGS[name] == _TEXT}
    row = {name: getattr(result, name) for name in COLUMNS if hasattr(result, name)}
    for name, run in (("dense", result.dense), ("sparse", result.sparse)):
        row |= {f"{name}_ppl": run.ppl, f"{name}_seconds": run.seconds}
    return row | settings | texts


def to_frame(rows: Iterable[Any]) -> pd.DataFrame:
    """Return rows, or a table, as a table in order; columns that somebody added are its last."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    added = frame.columns.difference(list(COLUMNS), sort=False)
    frame = frame.reindex(columns=[*COLUMNS, *added]).astype(COLUMNS)
    names = list(COLUMNS)
    order = [*names[names.index("model") : names.index("preset")], *_SETTINGS]
    return frame.sort_values(order, ignore_index=True)


def presets(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the preset of each row, missing where the row changes it."""
    names = frame["preset"].astype("string")
    return names.mask(names.str.contains(","))


def short_value(value: Any) -> str:
    """Return a setting for a table."""
    return "none" if str(value) == "<NA>" else format_value(value)


def varied_settings(frame: pd.DataFrame) -> list[str]:
    """Return the settings that distinguish rows; fields of recall only if it is on."""
    with_recall = frame[frame["recall"] > 0]
    return [
        name
        for name in _SETTINGS
        if (with_recall if name.startswith("recall_") else frame)[name].nunique(dropna=False) > 1
    ]


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Read the rows of the CSV file by cell, none if there is no file.

    Raises ValueError if it is another table.
    """
    import pandas as pd

    if not path.exists():
        return {}
    try:
        # As text first: some versions of pandas lose digits when they read numbers.
        frame: Any = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""])
        if "cell" not in frame:
            raise ValueError("it has no column 'cell'")
        frame = to_frame(frame)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be a table of an ablation: {error}") from error
    return {row["cell"]: row for row in frame.to_dict(orient="records")}


def add_row(row: Mapping[str, Any], path: Path) -> None:
    """Add a row to the CSV file, which is written whole or not at all.

    Other runs may add rows to the file at the same time: its rows are read again.
    """
    # The lock is the folder's: a file that is replaced cannot be locked itself.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = {**read_rows(path), row["cell"]: row}
        with replaced_file(path) as scratch:
            to_frame(rows.values()).to_csv(scratch, index=False)
    finally:
        os.close(folder)
