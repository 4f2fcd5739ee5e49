"""The table of an ablation: its columns, and its CSV file.

One row a cell, that is one `PrefillConfig` on one text at one context:

===================== ==============================================================================
cell                  digest of weights, tokens, protocol and settings: the same cell, the same row
model, dtype          name and weights' type of the model
dataset, text_source  name of the text, and where it came from
context               tokens of a window
windows               slice "begin:end" of the text's windows that do not overlap
protocol              which tokens of a window are scored, see `windows.scored_rows`
preset                that has these settings, empty if none
chunk_size, ...       every field of `PrefillConfig`; layers joined by "+" or "none", an empty
                      min_prefill is one chunk; recall_* are at their defaults if recall is 0, and
                      wide_factor without wide layers
scored_tokens         of all windows
dense_ppl, sparse_ppl perplexity over them
delta_percent         by how much the sparse one is above the dense one
stderr_percent        the standard error of that, from paired differences
kl_mean               mean of KL(dense || sparse) of the next-token distributions, nats
top1_agreement        share of tokens where both hold the same one most likely
attention_flops_ratio as `count_attention_flops` counts them in all windows, dense over sparse
recalled_keys         that a row sees, mean of all rows; empty if recall is 0
dense_seconds         of the forward calls of all windows; processes that run side by side slow each
sparse_seconds        other, and `benchmark_throughput` measures better
hardware, threads     that the sparse run had
torch, version        of PyTorch and of this package
commit                of this package, "+" if the checkout had changes
===================== ==============================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation.grid import format_value
from h2o_prefill.eval.perplexity.result import PerplexityResult
from h2o_prefill.presets import preset_name

if TYPE_CHECKING:
    import pandas as pd

_TEXT, _WHOLE, _REAL = "string", "Int64", "float64"

_NAMES = dict.fromkeys(("cell", "model", "dtype", "dataset", "text_source"), _TEXT)
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
    **_NAMES,
    "context": _WHOLE,
    "windows": _TEXT,
    "protocol": _TEXT,
    "preset": _TEXT,
    **_SETTINGS,
    "scored_tokens": _WHOLE,
    "dense_ppl": _REAL,
    "sparse_ppl": _REAL,
    **dict.fromkeys(_MEASURES, _REAL),
    "dense_seconds": _REAL,
    "sparse_seconds": _REAL,
    "hardware": _TEXT,
    "threads": _WHOLE,
    "torch": _TEXT,
    "version": _TEXT,
    "commit": _TEXT,
}

_ORDER = ["model", "dtype", "dataset", "text_source", "context", "windows", "protocol", *_SETTINGS]


def measures(result: PerplexityResult) -> dict[str, Any]:
    """Return the columns of a row that come from its result."""
    settings = dataclasses.asdict(result.config)
    for name, kind in _SETTINGS.items():
        if kind == _TEXT:
            settings[name] = format_value(settings[name])
    return {
        "preset": preset_name(result.config),
        **settings,
        "context": result.context,
        "protocol": result.protocol,
        "scored_tokens": result.scored_tokens,
        "dense_ppl": result.dense.ppl,
        "sparse_ppl": result.sparse.ppl,
        **{name: getattr(result, name) for name in _MEASURES},
        "dense_seconds": result.dense.seconds,
        "sparse_seconds": result.sparse.seconds,
    }


def to_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table in an order that does not depend on which came first."""
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(COLUMNS)).astype(COLUMNS)
    return frame.sort_values(_ORDER, ignore_index=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the CSV file; no rows if there is none.

    Raises
    ------
    ValueError
        If the file is another table.
    """
    import pandas as pd

    if not path.exists():
        return []
    try:
        # As text first: how pandas reads numbers loses digits in some versions.
        frame = pd.read_csv(path, dtype="string", keep_default_na=False, na_values=[""])
        if "cell" not in frame:
            raise ValueError("it has no column 'cell'")
        frame = frame.reindex(columns=list(COLUMNS)).astype(COLUMNS)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be a table of an ablation: {error}") from error
    return frame.to_dict(orient="records")
