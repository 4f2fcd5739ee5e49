"""Lexical recall by examples; tests/python/ops has its properties."""

from itertools import pairwise

import pytest
import torch
from op_testing import recall_text

from h2o_prefill.reference import ops


def entries(token_ids, begin, chunk_size, matches, table=None, **fields):
    """Return [(position, visible_from), ...] per block."""
    settings = recall_text(chunk_size, matches, **fields)
    found = ops.lexical_recall(torch.tensor(token_ids), begin, settings, table)
    offsets, positions, visible_from = found
    assert offsets.dtype == positions.dtype == visible_from.dtype == torch.int32
    pairs = list(zip(positions.tolist(), visible_from.tolist(), strict=True))
    bounds = offsets.tolist()
    return [pairs[a:b] for a, b in pairwise(bounds)]


def seen_from(row, *positions):
    return [(position, row) for position in positions]


def frequent(count):
    """Return a chunk of 64 tokens, so many of them 1, and one more 1."""
    pairs = [(1 if i < count else 100 + i, 200 + i) for i in range(32)]
    return [[token for pair in pairs for token in pair] + [1]]


@pytest.mark.parametrize(("count", "second_block"), [(31, seen_from(64, 60, 61, 62, 63)), (32, [])])
def test_a_frequent_token_is_not_looked_up_alone(count, second_block):
    assert entries(frequent(count), 0, 64, 1)[1] == second_block


def test_worked_example():
    """Chunks of six tokens, in blocks of two."""
    assert entries([[1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 1, 2, 1, 2]], 0, 6, 2) == [
        *([], [], []),
        [*seen_from(6, 0, 1, 2, 3), (4, 7)],  # "1" occurred at 0; "1 2" ended at 1
        seen_from(8, 2, 3, 4, 5),  # "2 3" ended at 2; 5 is new
        [*seen_from(10, 0, 1, 2, 3), (4, 11)],  # matches in the chunk do not count
        seen_from(12, 6, 7, 8, 9, 10, 11),  # the latest two of three
    ]


def test_characters_match_across_tokens():
    """Two tokens say "abcd"; other tokens said it before, and "ef" follows."""
    texts = ["ab", "cd", "ef", "a", "bc", "d", "x", ""]
    table = torch.tensor([[ord(c) for c in text.ljust(2, "\0")] for text in texts]).int()
    tokens = [[3, 4, 7, 5, 2, 6, 6, 6, 0, 1]]
    found = entries(tokens, 0, 8, 1, table, recall_characters=4)
    assert found[1] == [(4, 9), (5, 9), (6, 9), (7, 9)]
    assert entries(tokens, 0, 8, 1, table, recall_characters=5)[1] == []
