"""Scores, the selection of the memory set, and the gathering of its rows."""

import pytest
import torch

from h2o_prefill.reference import (
    build_memory_set,
    select_heavy_hitters,
)

S, L = 16, 4


@pytest.mark.parametrize(
    ("scores", "candidates", "best"),
    [
        ([1.0, 2.0, 2.0, 1.0, 2.0, 2.0], range(6), [1, 2, 4]),  # of equals the lower position
        ([0.5, 0.0], (0, 1, 5), [0, 1, 5]),  # a position without a score has 0
        ([torch.nan, 1.0, 0.0, 2.0], range(4), [3, 1, 2]),  # nan ranks last
    ],
)
def test_ties_missing_scores_and_nan(scores, candidates, best):
    assert select_heavy_hitters(torch.tensor([scores]), [set(candidates)], 3).tolist() == [best]


def test_a_token_of_chunk_zero_stays_while_its_score_is_high_and_never_returns():
    scores = torch.zeros(1, 2, 3 * S)
    scores[..., 2], scores[..., 5] = 9.0, 8.0
    memory = build_memory_set(None, 0, S, scores, L, 1)
    scores[..., 5] = 100.0  # too late: it is no candidate any more
    for chunk in (1, 2):
        memory = build_memory_set(memory, chunk * S, (chunk + 1) * S, scores, L, 1)
    assert memory[0].tolist() == [[2, *range(3 * S - L, 3 * S)]] * 2
