"""Selection of the memory set: what has no number, and wrong arguments."""

import pytest
import torch

from h2o_prefill import ops


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
