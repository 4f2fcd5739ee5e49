"""Several texts of a command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from h2o_prefill.eval import Corpus, load_text


def load_texts(datasets: str | None, files: Iterable[Path] | None) -> list[Corpus]:
    """Return the named datasets and files; WikiText-2 if nothing is named."""
    chosen = list(files or [])
    names = ([] if chosen else ["wikitext2"]) if datasets is None else datasets.split(",")
    corpora = [load_text(name.strip()) for name in names]
    return corpora + [load_text(text_file=file) for file in chosen]
