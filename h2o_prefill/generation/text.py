"""Text to evaluate on, its tokens and its windows."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill._errors import first_line
from h2o_prefill.vocabulary import check_tokenizer

DATASETS = ("wikitext2", "pydoc")
WIKITEXT2_VARIABLE = "H2O_PREFILL_WIKITEXT2"
_WINDOWS = re.compile(r"(\d*):(\d*)")
_HUB_WIKITEXT2 = ("Salesforce/wikitext", "wikitext-2-raw-v1")


@dataclass(frozen=True)
class Corpus:
    """A text and where it came from."""

    name: str  # one of `DATASETS`, or the name of the file
    text: str
    # Name and digest of the file, or name of the module or the hub's dataset: results on different
    # versions of one text differ.
    source: str


def load_text(
    dataset: str = "wikitext2", text_file: str | os.PathLike[str] | None = None
) -> Corpus:
    """Load an evaluation text: a dataset, or a UTF-8 file instead of it.

    "wikitext2" is the test split of WikiText-2 raw, from the file that H2O_PREFILL_WIKITEXT2 names,
    else from the hub; "pydoc" the help topics of Python itself, 465 thousand characters of English
    that every machine has. Raises ValueError or FileNotFoundError.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset must be one of {DATASETS}, got {dataset!r}")
    if text_file is not None:
        return file_corpus(Path(text_file).name, text_file, "text_file")
    if dataset == "pydoc":
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[key] for key in sorted(topics))
        return Corpus("pydoc", text, "pydoc_data.topics")
    named = os.environ.get(WIKITEXT2_VARIABLE)
    if named:
        return file_corpus("wikitext2", named, WIKITEXT2_VARIABLE)
    return _wikitext2_from_hub()


def as_corpus(text: Corpus | str, argument: str) -> Corpus:
    """Return a text as a corpus, or the dataset that it names; errors name `argument`."""
    if isinstance(text, str):
        text = load_text(text) if text in DATASETS else Corpus("text", text, "text")
    if not text.text.strip():
        raise ValueError(f"{argument} must not be empty text")
    return text


def file_corpus(name: str, path: str | os.PathLike[str], argument: str) -> Corpus:
    """Return the text of a UTF-8 file as a corpus; errors name `argument`."""
    text = read_text(path, argument)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Corpus(name, text, f"{Path(path).name} sha256:{digest}")


def encode(tokenizer: Any, text: str) -> Tensor:
    """Tokenise a text as a whole, with the tokenizer's own special tokens; int64 [tokens]."""
    check_tokenizer(tokenizer)
    # verbose=False: the text may be longer than the model takes.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def parse_windows(windows: str) -> tuple[int, int | None]:
    """Return begin and end of a slice "begin:end" of windows; an end of None is the text's."""
    match = _WINDOWS.fullmatch(windows.strip())
    begin = int(match[1] or 0) if match else 0
    end = int(match[2]) if match and match[2] else None
    if match is None or (end is not None and begin >= end):
        raise ValueError(f"windows must be a slice like 0:6, got {windows!r}")
    return begin, end


def select_windows(tokens: Tensor, context: int, windows: str) -> tuple[range, Tensor]:
    """Cut tokens [T] into windows; return a slice."""
    available = len(tokens) // context
    if available == 0:
        raise ValueError(
            f"text must hold at least one window of {context} tokens, got {len(tokens)} tokens"
        )
    begin, end = parse_windows(windows)
    end = available if end is None else end
    if not begin < end <= available:
        raise ValueError(
            f"windows must be a slice within 0:{available}, all that the text holds at context "
            f"{context}, got {windows!r}"
        )
    return range(begin, end), tokens[begin * context : end * context].view(-1, context)


def read_text(path: str | os.PathLike[str], argument: str) -> str:
    """Read a UTF-8 text, without the mark of its encoding; errors name `argument`."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise ValueError(f"{argument} must be a text file, got the folder {str(path)!r}")
    if not path.exists():
        raise FileNotFoundError(f"{argument}: no such file: {str(path)!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument} must be UTF-8 text, got {str(path)!r}: {error}") from error
    if "\0" in text or not text.strip():
        raise ValueError(f"{argument} must hold UTF-8 text, got {str(path)!r}")
    return text


def _wikitext2_from_hub() -> Corpus:
    path, config = _HUB_WIKITEXT2
    try:
        import datasets

        rows = datasets.load_dataset(path, config, split="test")
    except Exception as error:  # datasets raises its own, the hub's and the connection's
        why = first_line(error)
        raise ValueError(
            f"dataset 'wikitext2' is not on this machine and could not be downloaded ({why}): give "
            f"its wiki.test.raw by --text-file or {WIKITEXT2_VARIABLE}, or use the stand-in "
            "--dataset pydoc"
        ) from error
    return Corpus("wikitext2", "\n\n".join(rows["text"]), f"{path}/{config}/test")
