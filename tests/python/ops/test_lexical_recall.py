"""Lexical recall is strictly causal, and its lists are bounded."""

import random

import pytest
import torch
from op_testing import recall_text
from random_calls.draw import Draw, draw_settings

from h2o_prefill import ops


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.filterwarnings("ignore:the memory set")
def test_what_a_token_recalls_depends_on_no_later_token(seed):
    draw = Draw(random.Random(seed))
    config = draw_settings(draw, 200)
    text = config.replace(recall=max(config.recall, 1))
    begin = draw.choice([0, 37, 64])
    changed_from = draw.integer(begin, 199)
    tokens = torch.randint(0, 20, (1, 200), generator=torch.Generator().manual_seed(1))
    table = (torch.arange(60).view(20, 3) % 4).int().sort(descending=True).values
    changed = tokens.clone()
    changed[0, changed_from:] = (tokens[0, changed_from:] + 7) % 20

    def seen_before(ids):
        offsets, positions, visible_from = ops.lexical_recall(ids, begin, text, table)
        owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        early = visible_from < changed_from
        return torch.stack([owner[early], positions[early], visible_from[early]])

    assert torch.equal(seen_before(tokens), seen_before(changed))


def test_matches_that_overlap_are_passed_over_at_once():
    """Of equal tokens each has 1,024 matches, with nearly the same keys after them."""
    length, chunk = 8192, 1023  # blocks of one row
    tokens = torch.zeros(1, length, dtype=torch.int64)
    offsets, positions, _ = ops.lexical_recall(tokens, 0, recall_text(chunk, 1024))
    assert offsets.diff().tolist() == [0] * chunk + [1022] * chunk + [1024] * (length - 2 * chunk)
    assert torch.equal(positions[-1024:], torch.arange(8 * chunk - 1024, 8 * chunk).int())


def test_lists_without_end_are_refused():
    tokens = torch.arange(131072)[None] % 64
    with pytest.raises(ValueError, match="recall must list at most 67108864 keys for the blocks"):
        ops.lexical_recall(tokens, 0, recall_text(1023, 1024))
