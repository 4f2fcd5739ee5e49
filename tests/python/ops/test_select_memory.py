"""Selection of the memory set: what generated calls do not draw."""

import torch

from h2o_prefill import ops


def test_a_nan_score_ranks_last(device):
    scores = torch.tensor([[[float("nan"), 1, 0, float("nan"), 2, 0]]], device=device)
    memory = torch.empty(1, 1, 0, dtype=torch.int32, device=device)
    assert ops.select_memory(scores, memory, 0, 6, 0, 3, 0).tolist() == [[[1, 2, 4]]]
