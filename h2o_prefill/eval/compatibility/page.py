"""The findings of the sweep over model classes as a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import transformers

import h2o_prefill
from h2o_prefill.eval.compatibility.sweep import CHUNK_SIZE, TOKENS, TOLERANCE, Finding

COMMAND = "h2o-prefill models --markdown MODELS.md"
_HEADINGS = {
    "sparse": "Sparse",
    "dense": "Dense",
    "refused": "Refused by `enable`",
    "not run": "Not run",
}
_ABOUT = {
    "sparse": "At least one layer goes sparse when a prompt comes in one call without a cache.",
    "dense": "Enabled, and computed as without us.",
    "refused": "`enable` raises ValueError.",
    "not run": "No tiny model of these could be made from their default config, or it does not run "
    "on text alone. Nothing is known of them from this page.",
}


def models_page(findings: Sequence[Finding]) -> str:
    """Return the page.

    Parameters
    ----------
    findings : sequence of Finding
        Of the whole sweep.
    """
    counts = Counter(finding.result for finding in findings)
    wrong = sum(bool(finding.wrong) for finding in findings)
    parts = [
        "# Which models are prefilled sparsely",
        f"Made by `{COMMAND}` with h2o_prefill {h2o_prefill.__version__}, "
        f"transformers {transformers.__version__}, torch {torch.__version__}.",
        "Every class of transformers' auto mappings for causal language models, encoder-decoders "
        "and models of several parts (fed with text alone), as a tiny random model in float32 with "
        "everything but the sizes as its config has it by default. Each is compared with itself "
        f"enabled, on a prompt of {TOKENS} tokens in chunks of {CHUNK_SIZE} and with "
        "memory sets that hold everything: by the default attention and by eager attention, "
        "without a cache, with the one that it makes itself, with a `ChunkedPrefillCache` in one "
        "call and in several, with a `StaticCache` in several, and by `generate`. With small "
        "memory sets, outputs must be finite and the first chunk as stock. "
        "The difference is the largest one of a logit, as a part of the largest logit; more than "
        f"{TOLERANCE:g} is wrong.",
        f"{len(findings)} classes: "
        + ", ".join(f"{counts[result]} {result}" for result in _HEADINGS)
        + f"; {wrong} wrong.",
    ]
    for result, heading in _HEADINGS.items():
        rows = [finding for finding in findings if finding.result == result]
        if rows:
            parts += [f"## {heading}", _ABOUT[result], _table(rows)]
    return "\n\n".join(parts) + "\n"


def layers_text(finding: Finding) -> str:
    """Return sparse and all attention layers, as in "1 / 2"."""
    return f"{finding.sparse} / {finding.attention}" if finding.attention else ""


def reason_text(finding: Finding) -> str:
    """Return why a class, or a part of its layers, is dense, and what is wrong with it."""
    parts = [finding.reason.replace(f"of {finding.name} ", "")] if finding.reason else []
    if finding.sparse:
        parts += [f"{count} {kind}" for kind, count in finding.kinds.items()]
    parts += [f"WRONG: {text}" for text in finding.wrong]
    return "; ".join(parts)


def difference_text(finding: Finding) -> str:
    """Return the largest difference from stock with one digit."""
    return "" if finding.difference is None else f"{finding.difference:.0e}"


def _table(findings: Sequence[Finding]) -> str:
    run = findings[0].result in ("sparse", "dense")
    names = ["class", "kind", *(["sparse / attention layers", "difference"] if run else []), "why"]
    lines = [_row(names), _row(["---"] * len(names))]
    for finding in findings:
        measured = [layers_text(finding), difference_text(finding)] if run else []
        why = reason_text(finding).replace("|", "\\|").replace("<", "&lt;")
        lines.append(_row([f"`{finding.name}`", finding.kind, *measured, why]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
