"""Which keys a row of a sparse prefill sees: its chunk, its memory set, what it recalls."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_prefill.eval.attention.pattern_measures import held_positions
from h2o_prefill.eval.recalled_keys import RecalledKeys


def visible_keys(
    rows: range,
    chunk_begin: int,
    memory: Tensor,
    recalled: RecalledKeys | None = None,
    tail_begin: int | None = None,
) -> Tensor:
    """Mark the keys that rows of one chunk see.

    Row i of the chunk that begins at b sees key j <= i if j >= b, or j is in the memory set of the
    KV head, or i recalls j, or i lies in the dense tail.

    Parameters
    ----------
    rows : range
        Absolute positions.
    chunk_begin : int
        Where their chunk begins.
    memory : Tensor
        int32 [Hkv, M]: the sets that the chunk attends to, -1 where absent.
    recalled : RecalledKeys, optional
    tail_begin : int, optional
        First row of the dense tail.

    Returns
    -------
    Tensor
        bool [Hkv, rows, rows.stop]
    """
    device = memory.device
    key = torch.arange(rows.stop, device=device)
    row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    seen = (key >= chunk_begin).expand(len(rows), -1)
    if recalled is not None:
        seen = seen | recalled.mask(rows.start, rows.stop).to(device)
    if tail_begin is not None:
        seen = seen | (row >= tail_begin)
    return (seen | held_positions(memory, rows.stop).unsqueeze(1)) & (key <= row)
