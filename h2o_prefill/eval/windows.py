"""The windows of a text, and the scored tokens of a window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.generation.runs import check_model
from h2o_prefill.generation.text import Corpus, as_corpus, encode

PROTOCOLS = ("gptq", "llamacpp")

_WINDOWS = re.compile(r"(\d*):(\d*)")


def scored_rows(protocol: str, context: int) -> range:
    """Return the rows of a window whose next token is scored.

    "gptq" scores every token but the first (IST-DASLab/gptq, llama.py); "llamacpp" the second half,
    so that each scored token has at least half a window before it (ggml-org/llama.cpp,
    tools/perplexity).
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {PROTOCOLS}, got {protocol!r}")
    rows = range(context // 2 if protocol == "llamacpp" else 0, context - 1)
    if not rows:
        raise ValueError(f"a window must hold a token to score, got a length of {context}")
    return rows


def first_token(tokenizer: object, protocol: str) -> int | None:
    """Return BOS if llama.cpp replaces a window's first token by it, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if protocol != "llamacpp" or bos is None:
        return None
    ids = tokenizer("a")["input_ids"]  # type: ignore[operator]
    return bos if ids and ids[0] == bos else None


def parse_windows(windows: str) -> tuple[int, int | None]:
    """Return begin and end of a slice "begin:end" of windows; an end of None is the text's."""
    match = _WINDOWS.fullmatch(windows.strip())
    begin = int(match[1] or 0) if match else 0
    end = int(match[2]) if match and match[2] else None
    if match is None or (end is not None and begin >= end):
        raise ValueError(f"windows must be a slice like 0:6, got {windows!r}")
    return begin, end


def select_windows(
    tokens: Tensor, context: int, windows: str, first: int | None = None
) -> tuple[range, Tensor]:
    """Cut tokens [T] into windows, whose first token `first` replaces; return a slice."""
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
    batches = tokens[begin * context : end * context].view(-1, context)
    if first is not None:
        batches = batches.clone()
        batches[:, 0] = first
    return range(begin, end), batches


def model_windows(
    model: nn.Module,
    dataset: Tensor | Sequence[int] | Corpus | str,
    tokenizer: Any,
    context: int,
    windows: str,
    protocol: str,
) -> tuple[range, Tensor]:
    """Return the windows of a dataset; raise if the model takes none of this length."""
    check_model(model, context, "context")
    if isinstance(dataset, (str, Corpus)):
        corpus = as_corpus(dataset, "dataset")
        if tokenizer is None:
            raise ValueError("dataset is text, so a tokenizer must be given")
        tokens = encode(tokenizer, corpus.text)
    else:
        tokens = torch.as_tensor(dataset)
    if tokens.is_floating_point() or tokens.dim() != 1:
        raise ValueError(
            f"dataset must be a sequence of token ids, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    return select_windows(tokens.long(), context, windows, first_token(tokenizer, protocol))
