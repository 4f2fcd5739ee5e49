"""Lexical recall by examples; tests/python/ops has its properties."""

from itertools import pairwise

import pytest
import torch
from op_testing import recall_text

from h2o_prefill.reference import ops


def entries(token_ids, begin, chunk_size, block, matches, table=None, **fields):
    """Return [(position, visible_from), ...] per block."""
    settings = recall_text(chunk_size, block, matches, **fields)
    found = ops.lexical_recall(torch.tensor(token_ids), begin, settings, table)
    offsets, positions, visible_from = found
    assert offsets.dtype == positions.dtype == visible_from.dtype == torch.int32
    pairs = list(zip(positions.tolist(), visible_from.tolist(), strict=True))
    bounds = offsets.tolist()
    return [pairs[a:b] for a, b in pairwise(bounds)]


LONG = [[9, 0, 9, 1, 9, 2, 7, 8, 9, 3]]
SUFFIXES = [[1, 2, 5, 2, 6, 6, 6, 6, 1, 2]]
FREQUENT = [[1, 9, 1, 9, 1, 1]]  # the token 1 occurs three times up to 4, four times up to 5


@pytest.mark.parametrize(
    ("text", "arguments", "options", "second_block"),
    [
        # The latest matches win.
        (LONG, (8, 8, 1), {"recall_span": 1}, [(4, 8)]),
        (LONG, (8, 8, 2), {"recall_span": 1}, [(2, 8), (4, 8)]),
        # The longest n-gram with a match is used alone.
        (SUFFIXES, (8, 8, 4), {"recall_span": 1, "recall_suffix": 2}, [(0, 8), (1, 9)]),
        (SUFFIXES, (8, 8, 4), {"recall_span": 1, "recall_suffix": 1}, [(0, 8), (1, 9), (3, 9)]),
        # A frequent token is not looked up alone.
        (
            FREQUENT,
            (4, 4, 9),
            {"recall_span": 1, "recall_suffix": 1, "recall_max_count": 3},
            [(0, 4), (2, 4)],
        ),
        (FREQUENT, (4, 4, 9), {"recall_span": 1, "recall_suffix": 1, "recall_max_count": 2}, []),
        # The span stops at the chunk, and a match inside the chunk is not recalled.
        ([[5, 6, 7, 8, 8]], (4, 4, 1), {"recall_span": 3}, [(3, 4)]),
        ([[1, 2, 3, 4, 7, 7, 7, 7]], (4, 4, 4), {}, []),
    ],
)
def test_examples(text, arguments, options, second_block):
    assert entries(text, 0, *arguments, **options)[1] == second_block


def test_worked_example():
    assert entries([[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4]], 0, 4, 2, 2) == [
        [],
        [],
        [(0, 4), (1, 4), (2, 5)],  # "1" occurred at 0; "1 2" ended at 1
        [(2, 6), (3, 6)],  # "1 2 3" ended at 2; 5 is new
        [(0, 8), (1, 8), (4, 8), (5, 8), (2, 9), (6, 9)],
        # "2 3 4" ended at 3; "3 4" and "4" do not count.
        [(2, 10), (3, 10), (6, 10), (7, 10), (4, 11)],
    ]


def test_wrong_sizes_are_named():
    for begin, matches, message in ((5, 1, r"begin must be in \[0, 4\], got 5"), (0, 0, "recall")):
        with pytest.raises(ValueError, match=message):
            entries([[1, 2, 3, 4]], begin, 4, 2, matches)


def test_characters_match_across_tokens():
    """Two tokens say "abcd"; other tokens said it before, and "ef" follows."""
    texts = ["ab", "cd", "ef", "a", "bc", "d", "x", ""]
    table = torch.tensor([[ord(c) for c in text.ljust(2, "\0")] for text in texts]).int()
    tokens = [[3, 4, 7, 5, 2, 6, 6, 6, 0, 1]]
    found = entries(tokens, 0, 8, 8, 1, table, recall_characters=4)
    assert found[1] == [(4, 9), (5, 9), (6, 9), (7, 9)]
    assert entries(tokens, 0, 8, 8, 1, table, recall_characters=5)[1] == []
