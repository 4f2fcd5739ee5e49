"""The table of an ablation: its columns, and its CSV file.

One row a cell, that is one `PrefillConfig` on one text at one context:

===================== ==============================================================================
cell                  digest of weights, tokens, protocol and settings: the same cell, the same row
model, dtype          name of the model, and dtype of its weights
dataset, text_source  name of the text, and where it came from
context               tokens of a window
windows               slice "begin:end" of the windows of the text, which do not overlap
protocol              which tokens of a window are scored, see `windows.scored_rows`
preset                the preset that has these settings, empty if none has
chunk_size, ...       every field of `PrefillConfig`; layers joined by "+" or "none"; an empty
                      min_prefill is one chunk; recall_* are at their defaults if recall is 0, and
                      wide_factor without wide layers
scored_tokens         of all windows
dense_ppl, sparse_ppl perplexity over them
delta_percent         sparse perplexity above dense, in percent
stderr_percent        standard error of delta_percent, from paired differences
kl_mean               mean KL(dense || sparse) of the next-token distributions, nats
top1_agreement        share of tokens for which both runs have the same most likely token
attention_flops_ratio attention flops of all windows, dense over sparse (`count_attention_flops`)
recalled_keys         recalled keys that a row sees, mean of all rows; empty if recall is 0
dense_seconds         time of the forward calls of all windows
sparse_seconds        the same; `benchmark_throughput` measures times better
hardware, threads     what the sparse run used
torch, version        versions of PyTorch and of this package
commit                commit of this package, "+" if the checkout had changes
===================== ==============================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.eval.atomic_write import replaced_file
from h2o_prefill.eval.perplexity.result import PerplexityResult
from h2o_prefill.presets import preset_name

if TYPE_CHECKING:
    import pandas as pd

CSV_NAME = "perplexity_ablation.csv"

_TEXT, _WHOLE, _REAL = "string", "Int64", "float64"
_RUN = ("model", "dtype", "dataset", "text_source")
_SETTINGS = {
    field.name: _WHOLE if str(field.type).startswith("int") else _TEXT
    for field in dataclasses.fields(PrefillConfig)
}
_MEASURES = (
    "delta_percent",
    "stderr_percent",
    "kl_mean",
    "top1_agreement",
    "attention_flops_ratio",
    "recalled_keys",
)

# The type of each column, as pandas names it.
COLUMNS: dict[str, str] = {
    **dict.fromkeys(("cell", *_RUN), _TEXT),
    "context": _WHOLE,
    **dict.fromkeys(("windows", "protocol", "preset"), _TEXT),
    **_SETTINGS,
    "scored_tokens": _WHOLE,
    **dict.fromkeys(("dense_ppl", "sparse_ppl", *_MEASURES), _REAL),
    **dict.fromkeys(("dense_seconds", "sparse_seconds"), _REAL),
    "hardware": _TEXT,
    "threads": _WHOLE,
    **dict.fromkeys(("torch", "version", "commit"), _TEXT),
}


def measures(result: PerplexityResult) -> dict[str, Any]:
    """Return the columns of a row that come from its result."""
    settings = dataclasses.asdict(result.config)
    texts = {name: format_value(settings[name]) for name in settings if _SETTINGS[name] == _TEXT}
    return {
        "preset": preset_name(result.config),
        **settings,
        **texts,
        **{name: getattr(result, name) for name in ("context", "protocol", "scored_tokens")},
        **{name: getattr(result, name) for name in _MEASURES},
        "dense_ppl": result.dense.ppl,
        "sparse_ppl": result.sparse.ppl,
        "dense_seconds": result.dense.seconds,
        "sparse_seconds": result.sparse.seconds,
    }


def to_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table, ordered by text, context and settings."""
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(COLUMNS)).astype(COLUMNS)
    order = [*_RUN, "context", "windows", "protocol", *_SETTINGS]
    return frame.sort_values(order, ignore_index=True)


def varied_settings(frame: pd.DataFrame) -> list[str]:
    """Return the settings that tell rows apart; those of recall only where it is on."""
    with_recall = frame[frame["recall"] > 0]
    return [
        name
        for name in _SETTINGS
        if (with_recall if name.startswith("recall_") else frame)[name].nunique(dropna=False) > 1
    ]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the CSV file; no rows if there is none, ValueError if it is another table."""
    import pandas as pd

    if not path.exists():
        return []
    try:
        # As text first: some versions of pandas lose digits when they read numbers.
        frame = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""])
        if "cell" not in frame:
            raise ValueError("it has no column 'cell'")
        frame = frame.reindex(columns=list(COLUMNS)).astype(COLUMNS)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be a table of an ablation: {error}") from error
    return frame.to_dict(orient="records")


def begin_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows found, unless the file is there with the columns of this version."""
    header = ",".join(COLUMNS) + "\n"
    if not path.exists() or not path.read_text(encoding="utf-8").startswith(header):
        with replaced_file(path) as scratch:
            to_frame(rows).to_csv(scratch, index=False)


def append_row(row: Mapping[str, Any], path: Path) -> None:
    """Add the row of a finished cell to the CSV file."""
    to_frame([row]).to_csv(path, mode="a", header=False, index=False)
