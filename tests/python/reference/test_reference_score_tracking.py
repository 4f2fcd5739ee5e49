"""Task 3: scores."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill.reference import ScoreTracker


def softmax_weights(*shape, seed=0):
    torch.manual_seed(seed)
    return torch.randn(*shape).softmax(-1)


def test_initial_scores_are_the_column_sums():
    """Initial score correctness: column sum of intra-attention."""
    tracker = ScoreTracker(num_layers=1, num_heads=1, max_seq_len=3)
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.125, 0.375]]])
    tracker.set_initial_scores(0, 0, 3, weights)
    assert tracker.scores.tolist() == [[[1.75, 0.875, 0.375]]]


def test_votes_are_the_column_sums_at_the_memory_positions():
    """Update correctness: column sum of inter-attention."""
    tracker = ScoreTracker(num_layers=1, num_heads=2, max_seq_len=4)
    weights = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[1.0, 0.0], [0.25, 0.75]]])
    tracker.accumulate_scores(0, torch.tensor([[0, 3], [1, 2]], dtype=torch.int32), weights)
    assert tracker.scores.tolist() == [[[0.75, 0.0, 0.0, 1.25], [0.0, 1.25, 0.75, 0.0]]]


def test_scores_of_chunk_one_start_at_s():
    """Index alignment: chunk 1 scores start at index S; other layers and chunks stay untouched."""
    tracker = ScoreTracker(num_layers=2, num_heads=2, max_seq_len=12)
    weights = softmax_weights(2, 4, 4)
    tracker.set_initial_scores(1, 4, 8, weights)
    torch.testing.assert_close(tracker.scores[1, :, 4:8], weights.sum(-2))
    assert (tracker.scores[0] == 0).all()
    assert (tracker.scores[1, :, :4] == 0).all() and (tracker.scores[1, :, 8:] == 0).all()


def test_scores_never_fall():
    """Monotonic accumulation: scores never decrease."""
    tracker = ScoreTracker(num_layers=1, num_heads=2, max_seq_len=8)
    tracker.set_initial_scores(0, 0, 8, softmax_weights(2, 8, 8))
    memory = torch.tensor([[0, 2, 5], [1, 3, 7]], dtype=torch.int32)
    for chunk in range(5):
        before = tracker.scores.clone()
        tracker.accumulate_scores(0, memory, softmax_weights(2, 8, 3, seed=chunk))
        assert (tracker.scores >= before).all()
        assert (tracker.scores > before).sum() == memory.numel()


def test_long_sequences_neither_overflow_nor_lose_votes():
    """Numerical stability: no overflow or underflow after long sequences."""
    tracker = ScoreTracker(num_layers=1, num_heads=1, max_seq_len=4)
    memory = torch.tensor([[0, 2]], dtype=torch.int32)
    weights = torch.tensor([[[1.0 - 1e-3, 1e-3]]]).expand(1, 1024, 2)
    for _ in range(512):
        tracker.accumulate_scores(0, memory, weights)
    assert tracker.scores.isfinite().all()
    expected = 512 * 1024 * torch.tensor([1.0 - 1e-3, 1e-3])
    torch.testing.assert_close(tracker.scores[0, 0, [0, 2]], expected, rtol=1e-4, atol=0)


def test_heads_have_scores_of_their_own():
    """Per-head independence: different heads have different scores."""
    tracker = ScoreTracker(num_layers=1, num_heads=2, max_seq_len=4)
    weights = softmax_weights(2, 4, 4)
    tracker.set_initial_scores(0, 0, 4, weights)
    alone = ScoreTracker(num_layers=1, num_heads=1, max_seq_len=4)
    alone.set_initial_scores(0, 0, 4, weights[1:])
    assert (tracker.scores[0, 0] != tracker.scores[0, 1]).any()
    assert (tracker.scores[0, 1] == alone.scores[0, 0]).all()


def test_absent_memory_slots_get_no_vote():
    tracker = ScoreTracker(num_layers=1, num_heads=1, max_seq_len=4)
    memory = torch.tensor([[0, 3, -1, -1]], dtype=torch.int32)
    tracker.accumulate_scores(0, memory, torch.full((1, 2, 4), 0.25))
    assert tracker.scores.tolist() == [[[0.5, 0.0, 0.0, 0.5]]]


def test_lookup_by_tensor_and_by_sets():
    tracker = ScoreTracker(num_layers=1, num_heads=2, max_seq_len=4)
    tracker.scores[0] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    indices = torch.tensor([[3, 0], [1, -1]], dtype=torch.int32)
    assert tracker.get_scores(0, indices).tolist() == [[4.0, 1.0], [6.0, -torch.inf]]
    assert tracker.get_scores(0, [{3, 0}, {1}]).tolist() == [[1.0, 4.0], [6.0, -torch.inf]]


def test_wrong_widths_are_refused():
    tracker = ScoreTracker(num_layers=1, num_heads=1, max_seq_len=4)
    with pytest.raises(ValueError, match="must have 3 columns, got 2"):
        tracker.set_initial_scores(0, 0, 3, torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match=r"chunk_end must be <= max_seq_len \(4\), got 5"):
        tracker.set_initial_scores(0, 2, 5, torch.zeros(1, 3, 3))
