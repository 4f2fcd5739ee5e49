"""Task 7: sorted gather."""

from __future__ import annotations

import torch

from h2o_prefill.reference import ops, sorted_gather


def test_sorted_gather_equals_a_plain_gather_in_any_order():
    torch.manual_seed(0)
    cache = torch.randn(2, 3, 20, 4)
    indices = torch.randint(-1, 20, (2, 3, 9), dtype=torch.int32)
    assert (indices == -1).any()
    gathered = sorted_gather(cache, indices)
    for layer in range(2):
        for head in range(3):
            for slot, j in enumerate(indices[layer, head].tolist()):
                expected = cache[layer, head, j] if j >= 0 else torch.zeros(4)
                assert (gathered[layer, head, slot] == expected).all()


def test_absent_rows_of_poisoned_caches_are_zero():
    cache = torch.full((1, 1, 4, 2), torch.nan)
    absent = torch.full((1, 1, 3), -1, dtype=torch.int32)
    assert (ops.gather_rows(cache, absent) == 0).all()
    assert ops.gather_rows(cache[:, :, :0], absent).tolist() == [[[[0.0, 0.0]] * 3]]
    assert ops.gather_rows(cache, absent[..., :0]).shape == (1, 1, 0, 2)
