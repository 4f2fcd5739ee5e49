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


MOST = {"recall_span": 1024, "recall_max_count": 2**31 - 1, "recall_suffix": 1}


def test_matches_that_overlap_are_passed_over_at_once():
    """Of equal tokens each has 1,024 matches, with nearly the same keys after them."""
    length, chunk = 8192, 1024
    tokens = torch.zeros(1, length, dtype=torch.int64)
    offsets, positions, _ = ops.lexical_recall(tokens, 0, recall_text(chunk, 1, 1024, **MOST))
    assert offsets.diff().tolist() == [0] * chunk + [chunk] * (length - chunk)
    assert torch.equal(positions[-chunk:], torch.arange(chunk).int() + length - 2 * chunk)
    period = torch.arange(length)[None] % chunk
    offsets, positions, _ = ops.lexical_recall(period, 0, recall_text(chunk, 128, 1024, **MOST))
    # From the first match of the block's first token up to the chunk.
    listed = [i // 8 * chunk - i % 8 * 128 for i in range(8, length // 128)]
    assert offsets.diff().tolist() == [0] * 8 + listed


@pytest.mark.parametrize("tokens", [torch.zeros(1, 131072).long(), torch.arange(131072)[None] % 64])
def test_lists_without_end_are_refused(tokens):
    with pytest.raises(ValueError, match="recall must list at most 67108864 keys for the blocks"):
        ops.lexical_recall(tokens, 0, recall_text(1024, 1, 1024, **MOST))
