"""Losses of perplexity, each against its own program's dense mode, over the same windows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.compare import Timings
from common.modes import OURS, Mode
from common.report import Row, read_report
from h2o_prefill.eval.scores import perplexity, relative_difference
from h2o_prefill.generation.text import select_windows

# What a row keeps of a loss, and what must be the same in an earlier run to take its losses over.
_FIELDS = (
    "windows",
    "perplexity",
    "delta_percent",
    "stderr_percent",
    "kl_estimate",
    "scored_tokens",
    "format_percent",
)
_FACTS = ("model", "text", "dtype")

# Losses by length and mode.
Known = dict[tuple[int, str], Row]


def measure_losses(
    modes: Mapping[str, Mode], tokens: Tensor, length: int, windows: str, known: Known
) -> Iterator[tuple[str, Row]]:
    """Go through modes, with the loss of each as fields of a row; those that are not known join.

    "format_percent" compares a program's dense mode with the first mode: what the format of its
    weights loses. A dense mode that does not tell probabilities has a loss of 0 by definition, and
    no perplexity. Without windows no mode has a loss.
    """
    if not windows:
        yield from ((name, {}) for name in modes)
        return
    selected, batches = select_windows(tokens, length, windows)

    @functools.cache
    def nll(name: str) -> Tensor | None:
        if not modes[name].scores:
            return None
        # A process of its own: logits of all rows take memory that a prefill does not.
        worker = modes[name].start()
        try:
            scores = torch.from_numpy(worker.nll(batches.tolist(), 0, length - 1))
        finally:
            worker.close()
        if not bool(scores.isfinite().all()):
            raise ArithmeticError(f"{name} gave probabilities that are not finite")
        return scores

    for name, mode in modes.items():
        row = known.get((length, name), {})
        if row.get("windows") != list(selected):
            dense = nll(mode.dense)
            known[length, name] = {"windows": list(selected), **_loss(dense, nll(name))}
            if dense is not None:
                first: Any = nll(next(iter(modes)))
                known[length, name]["format_percent"] = relative_difference(first, dense)[0]
        yield name, known[length, name]


def _loss(dense: Tensor | None, nll: Tensor | None) -> Row:
    if dense is None or nll is None:
        return {"delta_percent": 0.0}
    delta, error = relative_difference(dense, nll)
    return {
        "perplexity": perplexity(nll),
        "delta_percent": delta,
        "stderr_percent": error,
        # Programs tell the probability of the text's tokens, not of all: over tokens that are
        # distributed as the model says, KL is half the mean square of the change, to second order.
        "kl_estimate": (nll - dense).double().square().mean().item() / 2,
        "scored_tokens": nll.numel(),
    }


def read_losses(files: Sequence[Path], facts: Mapping[str, Any]) -> Known:
    """Return the losses that earlier runs left; later files go first."""
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
    modes: Mapping[str, Mode], rows: Sequence[Row], timings: Timings
) -> Iterator[Row]:
    """Go through our modes and other programs, with a row for each pair.

    The baseline is the program's fastest mode with as many bits a weight whose relative increase in
    perplexity over its own dense mode is not above ours over transformers on the same windows; that
    of dense modes is 0. Standard errors are not taken into account.
    """
    others = dict.fromkeys(mode.program for mode in modes.values() if mode.program != OURS)
    lost = [row for row in rows if "delta_percent" in row]
    for ours in (row for row in lost if modes[row["variant"]].program == OURS):
        for program in others:
            allowed = max(0.0, ours["delta_percent"])
            candidates = [
                row
                for row in lost
                if modes[row["variant"]].program == program
                and modes[row["variant"]].bits == modes[ours["variant"]].bits
                and row["delta_percent"] <= allowed
            ]
            if not candidates:
                continue
            best = min(candidates, key=itemgetter("seconds"))
            yield {
                "ours": ours["variant"],
                "our_delta_percent": ours["delta_percent"],
                "baseline": best["variant"],
                "baseline_delta_percent": best["delta_percent"],
                **timings.ratio(best["variant"], ours["variant"]).fields("our_speedup"),
            }
