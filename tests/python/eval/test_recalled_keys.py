"""What lexical recall finds in a prompt, by rows."""

from __future__ import annotations

import torch

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.recalled_keys import RecalledKeys, find_recalled


def test_rows_of_the_lists_are_those_of_a_call() -> None:
    prompt = torch.randint(1, 9, (1, 72), generator=torch.Generator().manual_seed(5))
    config = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, recall=2, recall_block=8)
    recalled = find_recalled(prompt, config)
    assert recalled is not None
    for begin, end in ((0, 16), (32, 48), (64, 72)):
        call = ops.lexical_recall(prompt[:, :end], begin, 16, 8, 2)
        for ours, theirs in zip(recalled.of_rows(begin, end), call, strict=True):
            assert torch.equal(ours, theirs)
    assert find_recalled(prompt, config.replace(recall=0)) is None


def test_a_mask_shows_a_row_what_came_before_it() -> None:
    offsets, positions, visible_from = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 2, 3], [1, 0, 2], [2, 3, 4])
    )
    recalled = RecalledKeys(offsets, positions, visible_from, block=2)
    assert recalled.mask(1, 6).int().tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
    ]
