"""The selection of the memory set, where random calls do not look."""

import torch

from h2o_prefill.reference import select_heavy_hitters


def test_nan_ranks_last():
    scores = torch.tensor([[torch.nan, 1.0, 0.0, 2.0]])
    assert select_heavy_hitters(scores, [set(range(4))], 4).tolist() == [[3, 1, 2, 0]]
