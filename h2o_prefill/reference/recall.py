"""Lexical recall: an n-gram lookup of earlier positions that a token is likely to attend to.

If the last few tokens occurred before, the tokens that followed them then are likely to matter now.
The search reads token ids only, never activations, so one search serves all layers and heads.
"""

from __future__ import annotations

import math
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig

Settings = PrefillConfig | str

# Tokens of the longest n-gram that is looked up, keys recalled for each match, and how often a
# token may have occurred to be looked up alone.
_SUFFIX, _SPAN, _MAX_COUNT = 2, 4, 32

# Keys recalled for the latest match of a token's characters.
_CHARACTER_SPAN = 32


def lexical_recall(
    token_ids: Tensor, begin: int, settings: Any, token_text: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the earlier matches of the n-gram that ends at each new token, and of its characters.

    Only matches before the chunk of a token count: the chunk itself is visible anyway. The longest
    n-gram that has a match wins, alone; characters are looked up besides. Within a block each
    position appears once, and entries rise by (visible_from, position).
    """
    config = read_settings(settings)
    size, total = config.chunk_size, token_ids.shape[1]
    block = block_of(size)
    if config.recall < 1:
        raise ValueError(f"recall must be >= 1, got {config.recall}")
    if not 0 <= begin <= total:
        raise ValueError(f"begin must be in [0, {total}], got {begin}")
    offsets, positions, visible_from = [0], [], []
    for tokens in token_ids.tolist():
        characters = _Characters(tokens, token_text, config.recall_characters)
        for first in range(begin, total, block):
            chunk_begin = begin + (first - begin) // size * size
            first_row: dict[int, int] = {}
            for p in range(first, min(first + block, total)):
                matches = [(e, _SPAN) for e in _matches(tokens, p, chunk_begin, config.recall)]
                latest = characters.matches(p, chunk_begin)[:1]
                matches += [(t, _CHARACTER_SPAN) for t in latest]
                for e, span in matches:
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


def block_of(chunk_size: int) -> int:
    """Return how many rows share a list of recalled keys."""
    return math.gcd(chunk_size, 64)


def _matches(tokens: list[int], p: int, chunk_begin: int, most: int) -> list[int]:
    """Return where the longest n-gram with a match before the chunk ended, the latest first."""
    for n in range(min(_SUFFIX, p + 1), 0, -1):
        if n == 1 and tokens[: p + 1].count(tokens[p]) > _MAX_COUNT:
            return []
        suffix = tokens[p - n + 1 : p + 1]
        matches = [e for e in range(n - 1, chunk_begin) if tokens[e - n + 1 : e + 1] == suffix]
        if matches:
            return matches[::-1][:most]
    return []


class _Characters:
    """The text of the tokens as one sequence of characters, searched for runs of n of them."""

    def __init__(self, tokens: list[int], token_text: Tensor | None, n: int) -> None:
        table = [] if token_text is None or n == 0 else token_text.tolist()
        texts = [
            list(takewhile(bool, table[token])) if 0 <= token < len(table) else []
            for token in tokens
        ]
        self.n = n
        self.text = [c for characters in texts for c in characters]
        self.owners = [p for p, characters in enumerate(texts) for _ in characters]
        self.ends = list(accumulate(map(len, texts)))

    def matches(self, p: int, chunk_begin: int) -> list[int]:
        """Return the tokens that hold the character after each match, the latest match first."""
        end, n = self.ends[p], self.n
        if end < max(n, 1) or end == (self.ends[p - 1] if p else 0):
            return []
        before = self.ends[chunk_begin - 1] if chunk_begin else 0
        run = self.text[end - n : end]
        ends = [e for e in range(n, before + 1) if self.text[e - n : e] == run]
        return [self.owners[e] for e in reversed(ends)]


def read_settings(settings: Settings) -> Any:
    """Return settings as an object with the fields of `PrefillConfig`."""
    if isinstance(settings, str):
        return torch.classes.h2o_prefill.PrefillConfig.parse(settings)
    return settings
