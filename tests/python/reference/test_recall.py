"""Lexical recall."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_prefill.reference import ops


def entries(token_ids, *args, **options):
    """Return [(position, visible_from), ...] per block."""
    offsets, positions, visible_from = ops.lexical_recall(torch.tensor(token_ids), *args, **options)
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
        (LONG, (8, 8, 1), {"span": 1}, [(4, 8)]),
        (LONG, (8, 8, 2), {"span": 1}, [(2, 8), (4, 8)]),
        # The longest n-gram with a match is used alone.
        (SUFFIXES, (8, 8, 4), {"span": 1, "max_suffix": 2}, [(0, 8), (1, 9)]),
        (SUFFIXES, (8, 8, 4), {"span": 1, "max_suffix": 1}, [(0, 8), (1, 9), (3, 9)]),
        # A frequent token is not looked up alone.
        (FREQUENT, (4, 4, 9), {"span": 1, "max_suffix": 1, "max_count": 3}, [(0, 4), (2, 4)]),
        (FREQUENT, (4, 4, 9), {"span": 1, "max_suffix": 1, "max_count": 2}, []),
        # The span stops at the chunk, and a match inside the chunk is not recalled.
        ([[5, 6, 7, 8, 8]], (4, 4, 1), {"span": 3}, [(3, 4)]),
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


def test_calls_in_multiples_of_s_find_the_same_as_one_call():
    text = torch.randint(0, 5, (2, 30), generator=torch.Generator().manual_seed(0)).tolist()
    whole, later = entries(text, 0, 8, 4, 3), entries(text, 16, 8, 4, 3)
    per_row = len(whole) // 2
    assert later == whole[4:per_row] + whole[per_row + 4 :]


@st.composite
def searches(draw):
    total = draw(st.integers(0, 40))
    ids = draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    block = draw(st.integers(1, 5))
    return {
        "token_ids": torch.tensor([ids], dtype=torch.int64).reshape(1, total),
        "begin": draw(st.integers(0, total)),
        "chunk_size": block * draw(st.integers(1, 3)),
        "block": block,
        "max_matches": draw(st.integers(1, 4)),
        "max_suffix": draw(st.integers(1, 4)),
        "span": draw(st.integers(1, 3)),
        "max_count": draw(st.integers(1, 40)),
    }


@settings(max_examples=100, deadline=None)
@given(searches(), st.data())
def test_lists_are_well_formed_and_causal(case, data):
    """Order, range, no double entry; and a changed token changes no entry visible before it."""
    total, begin, block = case["token_ids"].shape[1], case["begin"], case["block"]
    found = entries(case["token_ids"].tolist(), *list(case.values())[1:])
    assert len(found) == -(-(total - begin) // block)
    for b, pairs in enumerate(found):
        first = begin + b * block
        chunk_begin = first - (first - begin) % case["chunk_size"]
        assert pairs == sorted(pairs, key=lambda pair: (pair[1], pair[0]))
        assert len({position for position, _ in pairs}) == len(pairs)
        assert len(pairs) <= block * case["max_matches"] * case["span"]
        for position, visible_from in pairs:
            assert 0 <= position < chunk_begin
            assert first <= visible_from < min(first + block, total)
    if total == 0:
        return
    changed = data.draw(st.integers(0, total - 1))
    other = case["token_ids"].clone()
    other[0, changed] = 4
    after = entries(other.tolist(), *list(case.values())[1:])
    for before_block, after_block in zip(found, after, strict=True):
        assert [e for e in before_block if e[1] < changed] == [
            e for e in after_block if e[1] < changed
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begin": 5}, r"begin must be in \[0, 4\], got 5"),
        ({"block": 3}, "chunk_size must be a multiple of block, got 4 and 3"),
        ({"max_matches": 0}, "max_matches must be >= 1, got 0"),
    ],
)
def test_wrong_sizes_are_named(change, message):
    arguments = {"begin": 0, "chunk_size": 4, "block": 2, "max_matches": 1} | change
    with pytest.raises(ValueError, match=message):
        ops.lexical_recall(torch.tensor([[1, 2, 3, 4]]), **arguments)
