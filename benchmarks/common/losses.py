"""Losses of perplexity, each against its own program's dense mode, over the same windows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from common.backends import OURS, Backend
from common.report import Row, read_report
from h2o_prefill.eval.perplexity.estimates import perplexity, relative_difference
from h2o_prefill.eval.perplexity.windows import scored_rows, select_windows
from h2o_prefill.eval.timing.compare import Timings

PROTOCOL = "gptq"

# What a row keeps of a loss, and what must be the same in an earlier run to take its losses over.
_FIELDS = ("version", "windows", "perplexity", "delta_percent", "stderr_percent", "scored_tokens")
_FACTS = ("model", "text", "dtype", "protocol")

# Losses by length and backend.
Known = dict[tuple[int, str], Row]


def measure_losses(
    backends: Mapping[str, Backend], tokens: Tensor, length: int, windows: str, known: Known
) -> Iterator[tuple[str, Row]]:
    """Go through backends, with the loss of each as fields of a row; those that are not known join.

    A dense backend that does not tell probabilities has a loss of 0 by definition, and no
    perplexity.
    """
    selected, batches = select_windows(tokens, length, windows)
    rows = scored_rows(PROTOCOL, length)

    @functools.cache
    def nll(name: str) -> Tensor | None:
        score = backends[name].nll
        if score is None:
            return None
        scores = score(batches, rows)
        if not bool(scores.isfinite().all()):
            raise ArithmeticError(f"{name} gave probabilities that are not finite")
        return scores

    for name, backend in backends.items():
        where = {"version": backend.version, "windows": list(selected)}
        row = known.get((length, name), {})
        if any(row.get(field) != value for field, value in where.items()):
            known[length, name] = {**where, **_loss(nll(backend.dense), nll(name))}
        yield name, known[length, name]


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


def read_losses(files: Sequence[Path], facts: Mapping[str, Any]) -> Known:
    """Return the losses that earlier runs left; those of later files go first."""
    losses: Known = {}
    for file in files:
        report = read_report(file)
        for name in _FACTS:
            if (there := report["config"].get(name)) != facts[name]:
                raise ValueError(
                    f"--losses must be a file of a run like this one, got {name} {there!r} in "
                    f"place of {facts[name]!r}"
                )
        for row in report["results"]:
            if "delta_percent" in row:
                fields = {name: row[name] for name in _FIELDS if name in row}
                losses[row["length"], row["variant"]] = fields
    return losses


def fastest_baselines(
    backends: Mapping[str, Backend], rows: Sequence[Row], timings: Timings
) -> Iterator[Row]:
    """Go through our backends and other programs, with a row for each pair.

    The baseline is the program's fastest mode whose relative increase in perplexity over its own
    dense mode is not above ours over transformers on the same windows; that of dense modes is 0.
    Standard errors are not taken into account.
    """
    others = dict.fromkeys(each.program for each in backends.values() if each.program != OURS)
    for ours in (row for row in rows if backends[row["variant"]].program == OURS):
        for program in others:
            modes = (row for row in rows if backends[row["variant"]].program == program)
            allowed = max(0.0, ours["delta_percent"])
            candidates = (row for row in modes if row["delta_percent"] <= allowed)
            best = min(candidates, key=itemgetter("seconds"))
            yield {
                "ours": ours["variant"],
                "our_delta_percent": ours["delta_percent"],
                "baseline": best["variant"],
                "baseline_delta_percent": best["delta_percent"],
                **timings.ratio(best["variant"], ours["variant"]).fields("our_speedup"),
            }
