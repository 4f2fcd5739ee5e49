"""Property tests of the selection rule, through the operator's oracle."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_prefill.reference import ops


@st.composite
def selections(draw):
    chunk_begin = draw(st.integers(0, 20))
    chunk_end = chunk_begin + draw(st.integers(0, 20))
    heads = draw(st.integers(1, 3))
    scored = draw(st.integers(0, chunk_end + 3))
    # Few different values, so that ties are common.
    value = st.sampled_from([0.0, 0.25, 1.0, 1.5, 7.0])
    scores = [draw(st.lists(value, min_size=scored, max_size=scored)) for _ in range(heads)]
    width = draw(st.integers(0, 8))
    earlier = st.integers(0, chunk_begin - 1) if chunk_begin else st.nothing()
    memory = []
    for _ in range(heads):
        held = sorted(draw(st.sets(earlier, max_size=min(width, chunk_begin))))
        memory.append(held + [-1] * (width - len(held)))
    return {
        "scores": torch.tensor(scores, dtype=torch.float32).reshape(1, heads, scored),
        "memory": torch.tensor(memory, dtype=torch.int32).reshape(1, heads, width),
        "chunk_begin": chunk_begin,
        "chunk_end": chunk_end,
        "local_window": draw(st.integers(0, 8)),
        "heavy_budget": draw(st.integers(0, 12)),
        "sink_tokens": draw(st.integers(0, 5)),
    }


@settings(max_examples=300, deadline=None)
@given(selections())
def test_selection_is_what_the_rule_says(case):
    """Size, order, padding, sinks, local window, and no candidate left out that beats one taken."""
    selected = ops.select_memory(**case)
    end, budget = case["chunk_end"], case["heavy_budget"]
    width = case["sink_tokens"] + case["local_window"] + budget
    assert selected.dtype == torch.int32
    assert selected.shape == (*case["memory"].shape[:2], width)
    retained = set(range(min(case["sink_tokens"], end)))
    retained |= set(range(max(end - case["local_window"], 0), end))
    for head, row in enumerate(selected[0].tolist()):
        members = [j for j in row if j >= 0]
        assert row == members + [-1] * (width - len(members))
        assert members == sorted(set(members))
        candidates = set(range(case["chunk_begin"], end))
        candidates |= {j for j in case["memory"][0, head].tolist() if j >= 0}
        heavy = set(members) - retained
        assert retained <= set(members)
        assert heavy <= candidates
        assert len(heavy) == min(budget, len(candidates - retained))

        scores = case["scores"][0, head].tolist()

        def rank(j, scores=scores):
            return (scores[j] if j < len(scores) else 0.0, -j)

        left_out = candidates - retained - heavy
        if heavy and left_out:
            assert min(map(rank, heavy)) > max(map(rank, left_out))


@settings(max_examples=50, deadline=None)
@given(selections())
def test_selection_ignores_positions_that_are_no_candidates(case):
    """A token that left never returns, whatever score it has by now."""
    expected = ops.select_memory(**case)
    candidates = torch.zeros_like(case["scores"], dtype=torch.bool)
    candidates[..., case["chunk_begin"] : case["chunk_end"]] = True
    for head, row in enumerate(case["memory"][0].tolist()):
        held = [j for j in row if 0 <= j < case["scores"].shape[2]]
        candidates[0, head, held] = True
    changed = case | {"scores": case["scores"].where(candidates, torch.tensor(1e9))}
    assert (ops.select_memory(**changed) == expected).all()
