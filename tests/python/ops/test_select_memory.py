"""Selection of the memory set: equal to the oracle, ties and all."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=150)
@given(data=st.data())
def test_agrees_with_the_oracle(dtype, data):
    begin = data.draw(st.integers(0, 40), "chunk_begin")
    end = begin + data.draw(st.integers(0, 40), "chunk length")
    local, heavy, sinks = (data.draw(st.integers(0, 50), name) for name in ("L", "H", "K"))
    seed = data.draw(st.integers(0, 1000), "seed")
    generator = torch.Generator().manual_seed(seed)
    known = data.draw(st.integers(0, end + 3), "positions with a score")
    # Few distinct scores, so that ties are the rule.
    scores = torch.randint(0, 4, (1, 3, known), generator=generator).to(dtype)
    width = data.draw(st.integers(0, 12), "earlier memory")
    memory = torch.full((1, 3, width), -1, dtype=torch.int32)
    for head in range(3):
        count = min(width, begin, int(torch.randint(0, 13, (1,), generator=generator)))
        memory[0, head, :count] = (
            torch.randperm(begin, generator=generator)[:count].sort().values.int()
        )
    arguments = (scores, memory, begin, end, local, heavy, sinks)
    selected = ops.select_memory(*arguments)
    assert torch.equal(selected, oracle.select_memory(*arguments))
    assert selected.shape == (1, 3, sinks + local + heavy) and selected.dtype == torch.int32


def test_a_nan_score_ranks_last(device):
    scores = torch.tensor([[[float("nan"), 1, 0, float("nan"), 2, 0]]], device=device)
    memory = torch.empty(1, 1, 0, dtype=torch.int32, device=device)
    assert ops.select_memory(scores, memory, 0, 6, 0, 3, 0).tolist() == [[[1, 2, 4]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, -3, 1, 0), "local_window must be >= 0, got -3"),
        ((0, 4, 1, -1, 0), "heavy_budget must be >= 0, got -1"),
        ((0, 4, 1, 1, -2), "sink_tokens must be >= 0, got -2"),
        ((-1, 4, 1, 1, 0), "chunk_begin must be >= 0, got -1"),
        ((0, 2**31, 1, 1, 0), "chunk_end must be <= 2147483647, got 2147483648"),
        ((0, 4, 1, 2**31 - 1, 0), "heavy_budget must be <= 4194304, got 2147483647"),
        ((0, 4, 2**63 - 1, 1, 0), "local_window must be <= 4194304, got 9223372036854775807"),
    ],
)
def test_wrong_arguments(device, arguments, message):
    scores = torch.zeros(1, 2, 4, device=device)
    memory = torch.zeros(1, 2, 0, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        ops.select_memory(scores, memory, *arguments)
