"""Lexical recall: an n-gram lookup of earlier positions that a token is likely to attend to.

If the last few tokens occurred before, the tokens that followed them then are likely to matter now.
The search reads token ids only, never activations, so one search serves all layers and heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lexical_recall(
    token_ids: Tensor,
    begin: int,
    chunk_size: int,
    block: int,
    max_matches: int,
    max_suffix: int = 3,
    span: int = 2,
    max_count: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the earlier matches of the n-gram that ends at each new token.

    Only matches before the chunk of a token count: the chunk itself is visible anyway. The longest
    n-gram that has a match wins, alone. Within a block each position appears once, and entries rise
    by (visible_from, position).
    """
    sizes = {
        "chunk_size": chunk_size,
        "block": block,
        "max_matches": max_matches,
        "max_suffix": max_suffix,
        "span": span,
        "max_count": max_count,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
    if chunk_size % block:
        raise ValueError(f"chunk_size must be a multiple of block, got {chunk_size} and {block}")
    total = token_ids.shape[1]
    if not 0 <= begin <= total:
        raise ValueError(f"begin must be in [0, {total}], got {begin}")
    offsets, positions, visible_from = [0], [], []
    for text in token_ids.tolist():
        for first in range(begin, total, block):
            chunk_begin = begin + (first - begin) // chunk_size * chunk_size
            first_row: dict[int, int] = {}
            for p in range(first, min(first + block, total)):
                for e in _matches(text, p, chunk_begin, max_matches, max_suffix, max_count):
                    for position in range(e, min(e + span, chunk_begin)):
                        first_row.setdefault(position, p)  # p rises: the first is the smallest
            for position, p in sorted(first_row.items(), key=lambda entry: (entry[1], entry[0])):
                positions.append(position)
                visible_from.append(p)
            offsets.append(len(positions))
    return (
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(visible_from, dtype=torch.int32),
    )


def _matches(
    text: list[int], p: int, chunk_begin: int, max_matches: int, max_suffix: int, max_count: int
) -> list[int]:
    """Return where the longest n-gram with a match before the chunk ended, the latest first."""
    for n in range(min(max_suffix, p + 1), 0, -1):
        if n == 1 and text[: p + 1].count(text[p]) > max_count:
            return []
        suffix = text[p - n + 1 : p + 1]
        matches = [e for e in range(n - 1, chunk_begin) if text[e - n + 1 : e + 1] == suffix]
        if matches:
            return matches[::-1][:max_matches]
    return []
