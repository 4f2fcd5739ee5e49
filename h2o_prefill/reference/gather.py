"""Task 7 of the method: fetch the rows of a memory set out of the cache."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Gather rows of every head by that head's own indices.

    Parameters
    ----------
    x : Tensor
        [..., T, D], any dtype. The leading dimensions are those of `indices`.
    indices : Tensor
        [..., M], integer, in [0, T), or -1 for an absent row.

    Returns
    -------
    Tensor
        [..., M, D]; the rows of -1 are 0.
    """
    absent = indices < 0
    if x.shape[-2] == 0:  # nothing to point at: every index must be -1
        return x.new_zeros(*indices.shape, x.shape[-1])
    rows = indices.long().masked_fill(absent, 0)
    taken = x.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, x.shape[-1]))
    return taken.masked_fill(absent.unsqueeze(-1), 0)


def sorted_gather(cache: Tensor, indices: Tensor) -> Tensor:
    """Gather rows in ascending order of their index, then put them in the order asked for.

    The result is that of a plain gather. Reading in rising addresses touches every cache line once,
    so this pays wherever the indices are in no order; memory sets are ascending already.

    Parameters
    ----------
    cache : Tensor
        [..., T, D].
    indices : Tensor
        [..., M], integer, in [0, T), in any order, or -1 for an absent row.

    Returns
    -------
    Tensor
        [..., M, D], row m being `cache[..., indices[m], :]`, or 0 where the index is -1.
    """
    ascending, order = indices.sort(dim=-1)
    rows = gather_rows(cache, ascending)
    back = order.argsort(dim=-1)
    return torch.gather(rows, -2, back.unsqueeze(-1).expand_as(rows))
