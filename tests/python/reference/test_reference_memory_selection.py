"""Task 4: the memory set."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill.reference import (
    build_memory_set,
    gather_memory_kv,
    get_heavy_hitter_candidates,
    get_local_window_indices,
    select_heavy_hitters,
)

S, L, H = 16, 4, 3


def random_scores(layers=2, heads=2, tokens=4 * S):
    torch.manual_seed(0)
    return torch.rand(layers, heads, tokens)


@pytest.mark.parametrize("chunk_end", [S, 2 * S, 2 * S - 1, S + 2])
def test_local_window_is_exactly_the_tail(chunk_end):
    """Local correctness: exactly tail L tokens."""
    assert get_local_window_indices(chunk_end, L).tolist() == list(range(chunk_end - L, chunk_end))


def test_local_window_of_a_short_text_is_clamped():
    """Local correctness: N < L."""
    assert get_local_window_indices(3, 8).tolist() == [0, 1, 2]
    assert get_local_window_indices(3, 0).tolist() == []


def test_heavy_hitters_are_the_top_h_by_score():
    """Heavy selection: top-H by score (manual sort comparison)."""
    scores = random_scores()[0]
    local = get_local_window_indices(S, L)
    candidates = get_heavy_hitter_candidates(None, 0, S, local) * 2
    heavy = select_heavy_hitters(scores, candidates, H)
    for head in range(2):
        expected = scores[head, : S - L].argsort(descending=True)[:H]
        assert heavy[head].tolist() == expected.tolist()


def test_of_equal_scores_the_lower_position_wins():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0]])
    assert select_heavy_hitters(scores, [set(range(6))], 3).tolist() == [[1, 2, 4]]


def test_a_position_never_scored_counts_as_zero():
    scores = torch.tensor([[0.5, 0.0]])
    assert select_heavy_hitters(scores, [{0, 1, 5}], 3).tolist() == [[0, 1, 5]]


def test_a_token_of_chunk_zero_survives_into_m2_while_its_score_is_high():
    """Cross-chunk propagation: a token from C_0 with high score appears in M_2.

    One that left never returns.
    """
    scores = torch.zeros(1, 1, 3 * S)
    scores[0, 0, 2], scores[0, 0, 5] = 9.0, 8.0
    memory = build_memory_set(None, 0, S, scores, L, 1)
    scores[0, 0, 5] = 100.0  # too late: it is no candidate any more
    memory = build_memory_set(memory, S, 2 * S, scores, L, 1)
    memory = build_memory_set(memory, 2 * S, 3 * S, scores, L, 1)
    assert memory[0, 0].tolist() == [2, *range(3 * S - L, 3 * S)]


def chain_of_sets(sink_tokens=0):
    scores = random_scores()
    memory, sets = None, []
    for chunk in range(4):
        start, end = chunk * S, min((chunk + 1) * S, 4 * S - 5)
        memory = build_memory_set(memory, start, end, scores, L, H, sink_tokens)
        sets.append((end, memory))
    return scores, sets


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_every_set_of_a_chain_is_well_formed(sink_tokens):
    """Index bounds, no overlap, sorted output, memory size exactly M = K + L + H."""
    for end, memory in chain_of_sets(sink_tokens)[1]:
        assert memory.dtype == torch.int32
        assert memory.shape == (2, 2, sink_tokens + L + H)
        assert ((memory >= 0) & (memory < end)).all()
        assert (memory[..., 1:] > memory[..., :-1]).all()  # so no position is both local and heavy
        assert (memory[..., -L:] == torch.arange(end - L, end)).all()
        assert (memory[..., :sink_tokens] == torch.arange(sink_tokens)).all()


def test_local_and_heavy_do_not_overlap():
    """No overlap: local and heavy are disjoint, though the best scores are in the local window."""
    scores = torch.arange(S).float().reshape(1, 1, S)
    memory = build_memory_set(None, 0, S, scores, L, H)
    assert memory[0, 0].tolist() == list(range(S - L - H, S))


def test_heads_and_layers_select_for_themselves():
    """Per-head independence: different heads can select different tokens."""
    scores, sets = chain_of_sets()
    memory = sets[-1][1]
    assert (memory[0, 0] != memory[0, 1]).any() and (memory[0, 0] != memory[1, 0]).any()
    alone = None
    for chunk in range(4):
        end = min((chunk + 1) * S, 4 * S - 5)
        alone = build_memory_set(alone, chunk * S, end, scores[1:, 1:], L, H)
    assert (alone[0, 0] == memory[1, 1]).all()


def test_a_text_too_short_for_the_set_pads_with_minus_one_at_the_end():
    memory = build_memory_set(None, 0, 5, torch.rand(1, 1, 5), L, H, sink_tokens=2)
    assert memory[0, 0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1]


def test_nan_never_wins_and_positions_behind_the_chunk_are_no_candidates():
    scores = torch.tensor([[[torch.nan, 1.0, 0.0, 2.0, 9.0]]])
    previous = torch.tensor([[[1, 4, -1]]], dtype=torch.int32)
    memory = build_memory_set(previous, 0, 4, scores, 0, 3)
    assert memory[0, 0].tolist() == [1, 2, 3]


def test_sinks_stay_however_low_their_score():
    scores = torch.ones(1, 1, 3 * S)
    scores[0, 0, :2] = 0.0
    memory = None
    for chunk in range(3):
        memory = build_memory_set(memory, chunk * S, (chunk + 1) * S, scores, L, H, sink_tokens=2)
    assert memory[0, 0, :2].tolist() == [0, 1]


def test_gather_takes_each_heads_own_rows():
    torch.manual_seed(0)
    cache = torch.randn(2, 2, 3, 10, 4)
    indices = torch.stack([torch.randperm(10)[:5] for _ in range(6)]).reshape(2, 3, 5).int()
    indices[1, 2, 3:] = -1
    keys, values = gather_memory_kv(cache, indices)
    assert keys.shape == values.shape == (2, 3, 5, 4)
    for layer in range(2):
        for head in range(3):
            for slot, j in enumerate(indices[layer, head].tolist()):
                expected = cache[layer, :, head, j] if j >= 0 else torch.zeros(2, 4)
                assert (keys[layer, head, slot] == expected[0]).all()
                assert (values[layer, head, slot] == expected[1]).all()


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
    arguments = {
        "prev_memory": None,
        "chunk_start": 0,
        "chunk_end": 8,
        "scores": torch.rand(1, 1, 8),
        "local_window_size": 2,
        "heavy_budget": 2,
    }
    with pytest.raises(ValueError, match=message):
        build_memory_set(**(arguments | change))


def test_one_candidate_set_per_head_is_required():
    with pytest.raises(ValueError, match=r"one set per head \(2\), got 1"):
        select_heavy_hitters(torch.rand(2, 4), [{0}], 1)
