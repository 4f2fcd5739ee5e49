"""Scores, the selection of the memory set, and the gathering of its rows."""

import pytest
import torch

from h2o_prefill.reference import (
    ScoreTracker,
    build_memory_set,
    gather_memory_kv,
    select_heavy_hitters,
    sorted_gather,
)

S, L = 16, 4


def test_first_scores_are_the_column_sums_at_the_chunks_positions():
    tracker = ScoreTracker(num_layers=2, num_heads=1, max_seq_len=6)
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.125, 0.375]]])
    tracker.set_initial_scores(1, 2, 5, weights)
    assert tracker.scores.tolist() == [[[0] * 6], [[0, 0, 1.75, 0.875, 0.375, 0]]]


def test_later_chunks_add_their_column_sums_at_the_memory_positions():
    """Scores never fall; absent slots and other positions get nothing."""
    tracker = ScoreTracker(num_layers=1, num_heads=2, max_seq_len=4)
    tracker.scores.fill_(1.0)
    weights = torch.tensor(
        [[[0.25, 0.75, 9.0], [0.5, 0.5, 9.0]], [[1.0, 0.0, 9.0], [0.25, 0.75, 9]]]
    )
    memory = torch.tensor([[0, 3, -1], [1, 2, -1]], dtype=torch.int32)
    tracker.accumulate_scores(0, memory, weights)
    assert tracker.scores.tolist() == [[[1.75, 1.0, 1.0, 2.25], [1.0, 2.25, 1.75, 1.0]]]
    found = tracker.get_scores(0, memory)
    assert found.tolist() == [[1.75, 2.25, -torch.inf], [2.25, 1.75, -torch.inf]]


@pytest.mark.parametrize(("reduce", "expected"), [("sum", [2.0, 3.0]), ("max", [1.5, 2.0])])
def test_the_query_heads_of_a_group_are_combined(reduce, expected):
    tracker = ScoreTracker(1, 1, 2, gqa_reduce=reduce)
    by_head = torch.tensor([[[[0.5, 0.5], [0.0, 0.5]], [[1.0, 1.0], [0.5, 1.0]]]])
    tracker.set_initial_scores(0, 0, 2, by_head)
    assert tracker.scores.tolist() == [[expected]]


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


def test_gather_takes_each_heads_own_rows():
    torch.manual_seed(0)
    cache = torch.randn(2, 2, 3, 20, 4)
    indices = torch.randint(-1, 20, (2, 3, 9), dtype=torch.int32)
    assert (indices == -1).any()
    keys, values = gather_memory_kv(cache, indices)
    for layer in range(2):
        for head in range(3):
            for slot, j in enumerate(indices[layer, head].tolist()):
                expected = cache[layer, :, head, j] if j >= 0 else torch.zeros(2, 4)
                assert torch.equal(keys[layer, head, slot], expected[0])
                assert torch.equal(values[layer, head, slot], expected[1])
    assert torch.equal(sorted_gather(cache[:, 0], indices), keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_start": -1}, "chunk_start must be >= 0, got -1"),
        ({"chunk_start": 9}, r"chunk_end must be >= chunk_start \(9\), got 8"),
        ({"local_window_size": -3}, "local_window_size must be >= 0, got -3"),
        ({"heavy_budget": -1}, "heavy_budget must be >= 0, got -1"),
        ({"sink_tokens": -2}, "sink_tokens must be >= 0, got -2"),
    ],
)
def test_wrong_sizes_are_named(change, message):
    sizes = {"chunk_start": 0, "chunk_end": 8, "local_window_size": 2, "heavy_budget": 2}
    with pytest.raises(ValueError, match=message):
        build_memory_set(None, scores=torch.rand(1, 1, 8), **(sizes | change))
