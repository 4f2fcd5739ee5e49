"""Lexical recall: equal to the brute-force oracle, and strictly causal."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle


@settings(max_examples=100)
@given(data=st.data())
def test_agrees_with_the_oracle(data):
    length = data.draw(st.integers(0, 120), "length")
    begin = data.draw(st.integers(0, length), "begin")
    block = data.draw(st.sampled_from([1, 4, 8]), "block")
    chunk_size = block * data.draw(st.integers(1, 5), "blocks of a chunk")
    words = data.draw(st.integers(1, 12), "vocabulary")
    seed = data.draw(st.integers(0, 1000), "seed")
    tokens = (
        torch.randint(0, words, (2, length), generator=torch.Generator().manual_seed(seed)) * 10**12
    )
    max_matches, suffix, span = (
        data.draw(st.integers(1, 4), name) for name in ("max_matches", "max_suffix", "span")
    )
    max_count = data.draw(st.integers(1, 40), "max_count")
    arguments = (tokens, begin, chunk_size, block, max_matches, suffix, span, max_count)
    for actual, expected in zip(
        ops.lexical_recall(*arguments), oracle.lexical_recall(*arguments), strict=True
    ):
        assert actual.dtype == torch.int32 and torch.equal(actual, expected)


@settings(max_examples=100)
@given(data=st.data())
def test_what_a_token_recalls_depends_on_no_later_token(data):
    block = data.draw(st.sampled_from([1, 4, 16]), "block")
    chunk_size = block * data.draw(st.integers(1, 4), "blocks of a chunk")
    begin = data.draw(st.sampled_from([0, 37, 64]), "begin")
    changed_from = data.draw(st.integers(begin, 199), "first token that changes")
    max_matches, suffix, span = (
        data.draw(st.integers(1, 6), name) for name in ("max_matches", "max_suffix", "span")
    )
    max_count = data.draw(st.integers(1, 40), "max_count")
    tokens = torch.randint(0, 20, (1, 200), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, changed_from:] = (tokens[0, changed_from:] + 7) % 20

    def seen_before(ids):
        offsets, positions, visible_from = ops.lexical_recall(
            ids, begin, chunk_size, block, max_matches, suffix, span, max_count
        )
        owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        early = visible_from < changed_from
        return torch.stack([owner[early], positions[early], visible_from[early]])

    assert torch.equal(seen_before(tokens), seen_before(changed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((11, 8, 4, 1), r"begin must be in \[0, 10\], got 11"),
        ((0, 8, 3, 1), "chunk_size must be a multiple of block, got 8 and 3"),
        ((0, 8, 4, 0), "max_matches must be >= 1, got 0"),
        ((0, 8, 4, 2**40), "max_matches must be <= 1024, got 1099511627776"),
        ((0, 8, 4, 1, 10**6), "max_suffix must be <= 64, got 1000000"),
        ((0, 8, 4, 1, 3, 2**63 - 1), "span must be <= 1024, got 9223372036854775807"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.lexical_recall(torch.zeros(1, 10, dtype=torch.int64), *arguments)


def test_token_ids_must_be_int64():
    with pytest.raises(ValueError, match="token_ids must be int64, got int32"):
        ops.lexical_recall(torch.zeros(1, 10, dtype=torch.int32), 0, 8, 4, 1)
