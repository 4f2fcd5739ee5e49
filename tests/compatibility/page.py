"""The page classes.md: classes of transformers by what enabling does to them.

`PYTHONPATH=tests python -m compatibility.page` writes it for the installed transformers.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from compatibility.examine import CHUNK_SIZE, TOKENS, TOLERANCE, Finding, examine
from compatibility.tiny_model import model_classes
from rich.progress import track

from h2o_prefill.hf.kinds import WINDOWED

PAGE = Path(__file__).parent / "classes.md"
HEADINGS = {
    "sparse": ("Sparse", "At least one layer is sparse when a prompt comes in one call."),
    "dense": ("Dense", "The model computes what it computes without h2o_prefill."),
    "refused": ("Refused by `enable`", "`enable` raises ValueError."),
    "not run": (
        "Not examined",
        "The default config makes no tiny model, or the model does not run on text alone.",
    ),
}


def models_page(findings: Sequence[Finding]) -> str:
    """Return the page: a table for each result, a row for each reason."""
    parts = [
        "# Which classes are prefilled sparsely",
        f"Classes of transformers {transformers.__version__} (torch {torch.__version__}), from the "
        "auto mappings for causal language models, encoder-decoders and composite models, fed "
        "with text alone. `PYTHONPATH=tests python -m compatibility.page` examines each as a tiny "
        "random float32 model with its default config: enabled with memory sets that hold "
        f"everything, on {TOKENS} tokens in chunks of {CHUNK_SIZE}, its logits differ from the "
        f"stock model's by at most {TOLERANCE:g} of the largest, with every kind of cache and by "
        "`generate`; with small memory sets they are finite, and equal in the first chunk.",
    ]
    for result, (heading, about) in HEADINGS.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for finding in findings:
            if finding.result == result:
                groups[reason_text(finding)].append(f"`{finding.name}`")
        if groups:
            rows = [f"| {why} | {', '.join(names)} |" for why, names in sorted(groups.items())]
            title = f"## {heading} ({sum(map(len, groups.values()))})"
            table = "\n".join(["| why | classes |", "| --- | --- |", *rows])
            parts += [title, about, table]
    return "\n\n".join(parts) + "\n"


def layers_text(finding: Finding) -> str:
    """Return the number of sparse layers and of all attention layers, as in "1 / 2"."""
    return f"{finding.sparse} / {finding.attention}" if finding.attention else ""


def reason_text(finding: Finding) -> str:
    """Return why a class, or a part of its layers, is dense, and what is wrong with it."""
    if finding.result == "not run":
        return "not examined"
    parts = [finding.reason.replace(f"of {finding.name} ", "").replace(f"{finding.name} ", "it ")]
    if finding.sparse:
        how = {kind: "exact" if kind in WINDOWED else "dense" for kind in finding.kinds}
        parts.append("; ".join(f"{kind.replace('_', ' ')} layers {x}" for kind, x in how.items()))
    parts += [f"WRONG: {text}" for text in finding.wrong]
    text = "; ".join(part for part in parts if part) or "all attention layers"
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    found = [examine(name, kind) for name, kind in track(model_classes().items())]
    PAGE.write_text(models_page(found), encoding="utf-8")
