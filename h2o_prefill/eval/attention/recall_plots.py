"""The figure of what lexical recall brings back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_prefill.eval.plotting import TITLE, bin_width, draw_map, make_figure, mark_chunks
from h2o_prefill.eval.recalled_keys import RecalledKeys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Positions of a column: recalled keys are few, and a column a token would be all but empty.
_COLUMNS = 128


def plot_recalled(recalled: RecalledKeys, chunk_ends: Sequence[int]) -> Figure:
    """Draw from where each block of rows recalls keys, and how many."""
    length = chunk_ends[-1]
    width = max(bin_width(length), -(-length // _COLUMNS))
    counts = recalled_counts(recalled, length, width)
    rows = torch.arange(counts.shape[0]) * recalled.block
    chunk_begin = torch.tensor([_chunk_begin(int(row), chunk_ends) for row in rows])
    # A block can recall what lies before its chunk, and nothing else.
    values = counts.float().masked_fill(
        torch.arange(0, length, width) >= chunk_begin.unsqueeze(1), math.nan
    )
    figure = make_figure(5.2)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    highest = max(1, int(counts.amax()))
    image = draw_map(left, values, length, width, cmap="magma_r", vmin=0, vmax=highest)
    # Rows in tokens, as the columns are.
    image.set_extent((0, values.shape[1] * width, 0, counts.shape[0] * recalled.block))
    left.set_ylim(0, length)
    mark_chunks(left, chunk_ends)
    left.set_title("keys that lexical recall brings back", **TITLE)
    left.set_xlabel(
        f"position recalled (tokens, {width} a column; dotted: chunk boundaries; grey: not before "
        "the chunk)"
    )
    left.set_ylabel(f"rows that recall (tokens, blocks of {recalled.block})")
    sums = counts.sum(1).tolist()
    edges = [*rows.tolist(), length]
    right.stairs(sums, edges, orientation="horizontal", fill=True, color="#0072B2", alpha=0.7)
    right.set_title("by block", **TITLE)
    right.set_xlabel("keys recalled")
    right.set_xlim(left=0)
    right.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=left, label="keys recalled by the block")
    return figure


def recalled_counts(recalled: RecalledKeys, length: int, width: int) -> Tensor:
    """Return int64 [blocks, bins]: keys that a block recalls from each bin of `width` positions."""
    blocks = recalled.offsets.numel() - 1
    entries = recalled.offsets.long().diff()
    block = torch.repeat_interleave(torch.arange(blocks), entries)
    bins = -(-length // width)
    place = block * bins + recalled.positions.long() // width
    return torch.bincount(place, minlength=blocks * bins).view(blocks, bins)


def _chunk_begin(row: int, chunk_ends: Sequence[int]) -> int:
    return max((end for end in chunk_ends if end <= row), default=0)
