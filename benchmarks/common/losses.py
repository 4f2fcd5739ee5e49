"""Perplexity of ways to run one model, each beside its own dense mode, over the same windows."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from common.report import Row
from common.ways import Way
from h2o_prefill.eval.perplexity.estimates import perplexity, relative_difference
from h2o_prefill.eval.perplexity.windows import scored_rows, select_windows

PROTOCOL = "gptq"

# What of a loss a row keeps, and what of an earlier run must be the same to take it over.
_FIELDS = (
    "version",
    "windows",
    "perplexity",
    "delta_percent",
    "stderr_percent",
    "scored_tokens",
)
_FACTS = ("model", "text", "dtype", "protocol")


class Losses:
    """Losses over the windows of a text."""

    def __init__(
        self,
        tokens: Tensor,
        windows: Mapping[int, str],
        known: Mapping[tuple[int, str], Row],
    ) -> None:
        self._tokens = tokens
        self._windows = windows
        self._known = dict(known)

    def measure(self, ways: Mapping[str, Way], length: int) -> Iterator[tuple[str, Row]]:
        """Go through ways, with the loss of each as fields of a row.

        A dense way that does not tell probabilities has a loss of 0 by definition, and no
        perplexity.
        """
        selected, batches = select_windows(self._tokens, length, self._windows[length])
        rows = scored_rows(PROTOCOL, length)

        @functools.cache
        def nll(name: str) -> Tensor | None:
            score = ways[name].nll
            if score is None:
                return None
            scores = score(batches, rows)
            if not bool(scores.isfinite().all()):
                raise ArithmeticError(f"{name} gave probabilities that are not finite")
            return scores

        for name, way in ways.items():
            where = {"version": way.version, "windows": list(selected)}
            known = self._known.get((length, name), {})
            if any(known.get(field) != value for field, value in where.items()):
                self._known[length, name] = {**where, **_loss(nll(way.dense), nll(name))}
            yield name, self._known[length, name]


def _loss(dense: Tensor | None, nll: Tensor | None) -> Row:
    if dense is None or nll is None:
        return {"delta_percent": 0.0}
    delta, error = relative_difference(dense, nll)
    return {
        "perplexity": perplexity(nll),
        "delta_percent": delta,
        "stderr_percent": error,
        "scored_tokens": nll.numel(),
    }


def read_losses(files: Sequence[Path], facts: Mapping[str, Any]) -> dict[tuple[int, str], Row]:
    """Return the losses that earlier runs left, by length and way; those of later files go
    first.
    """
    losses: dict[tuple[int, str], Row] = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        for name in _FACTS:
            if (there := found["options"].get(name)) != facts[name]:
                raise ValueError(
                    f"--losses must be a file of a run like this one, got {name} {there!r} in "
                    f"place of {facts[name]!r}"
                )
        for row in found["rows"]:
            if "delta_percent" in row:
                fields = {name: row[name] for name in _FIELDS if name in row}
                losses[row["length"], row["variant"]] = fields
    return losses
