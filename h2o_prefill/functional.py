"""The operators with the options of one layer, and a `LayerState`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import LayerState

RecallLists = tuple[Tensor | None, Tensor | None, Tensor | None]

# Softmax scale, sinks and softcap, as the operators take them.
LogitOptions = tuple[float | None, Tensor | None, float]

PLAIN_LOGITS: LogitOptions = (None, None, 0.0)

NO_RECALL: RecallLists = (None, None, None)

# The next memory set of a layer, its scores, and errors, as `LayerState.checkpoint` returns them.
Checkpoint = tuple[Tensor, Tensor, Tensor]


class LayerOptions(NamedTuple):
    """What the operators of one layer take besides tensors and state."""

    recall: RecallLists  # what `lexical_recall` returned for the call
    layer: int
    settings: str  # of all layers
    logits: LogitOptions
    window: int | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The same as `LayerState.attend` and `ops.prefill_attention_` take them."""
        return self.layer, self.settings, *self.logits, *self.recall, self.window


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Any,
    config: PrefillConfig,
    recall: RecallLists = NO_RECALL,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Any]:
    """Prefill one layer sparsely, whatever the length of the call; return a new state after it.

    Arguments as for `ops.chunked_sparse_attention`, and a `LayerState`. Without one, all earlier
    tokens are candidates for the first memory set, with score 0.
    """
    before = LayerState() if state is None else state  # whose tensors are None without scores
    scores, memory, errors = before.scores, before.memory, before.errors
    options = *recall, before.last_chunk_begin, config, scale, sinks, softcap, errors
    out, scores, memory, errors = ops.chunked_sparse_attention(q, k, v, scores, memory, *options)
    after = LayerState()
    begin = config.last_chunk_begin(k.shape[2] - q.shape[2], q.shape[2])
    after.set_scores(scores, memory, begin, errors)
    return out, after


def paged_sparse_attention_(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_table: Tensor,
    total: int,
    out: Tensor,
    state: Checkpoint | None,
    layer: int,
    settings: str,
    checkpoints: int = 0,
    recall: RecallLists = NO_RECALL,
    scale: float | None = None,
) -> Checkpoint:
    """Prefill one layer of one request whose keys and values lie in pages, into `out`.

    Sparse in every call, except in dense layers and by `exact` settings. Nothing waits for the
    device. Pages are copied out first, on GPUs by a kernel where rows are contiguous and begin at
    multiples of 16 bytes.

    Parameters
    ----------
    q : Tensor
        [1, Hq, T, D], the last of the first `total` tokens, with any strides.
    pages : tuple of Tensor
        Keys [pages, Hkv, size, D] and values [pages, Hkv, size, Dv], with any strides.
    page_table : Tensor
        int32 or int64 [any]: token t is row t % size of page page_table[t // size].
    total : int
        Tokens in the pages.
    out : Tensor
        [1, Hq, T, Dv], with any strides.
    state : tuple of Tensor, optional
        The checkpoint before the call. None: all earlier tokens are candidates for the first memory
        set, with score 0.
    layer, settings
        Index of the layer, and settings of the whole model.
    checkpoints : int
        How many to return: of the ends of the call's chunks, the last of which may be short.
    recall : tuple of Tensor
        What `lexical_recall` returned for the call.
    scale : float, optional
        Of the softmax, D ** -0.5 by default.

    Returns
    -------
    tuple of Tensor
        Checkpoints at the last ends of chunks, none of a dense call: int32 [C, 1, Hkv,
        `PrefillConfig.memory_size` of the layer], float32 (float64 for float64 queries) of the same
        shape, and float32 [C, 1, Hkv, 4].
    """
    options = *(state or (None, None, None)), *recall, layer, settings, checkpoints, scale
    op = torch.ops.h2o_prefill.paged_sparse_attention_
    written: Checkpoint = op(q, *pages, page_table, total, out, *options)
    return written


def token_rows(values: Any, device: Any = None) -> Tensor:
    """Return token ids as int64 [B, T], lists and single rows too; other tensors as they are."""
    rows = values
    if not isinstance(values, Tensor):
        try:
            rows = torch.tensor(values, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"token ids must be a tensor, or lists of ints of equal length ({error})"
            ) from None
        if rows.is_floating_point() and rows.numel() > 0:
            raise ValueError("token ids must be ints, got floats")
        rows = rows.long()
    narrow = rows.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    rows = rows.long() if narrow else rows
    return rows.unsqueeze(0) if rows.ndim == 1 else rows


def lists_of_rows(lists: RecallLists, length: int, begin: int, end: int, block: int) -> RecallLists:
    """Return the lists of recalled keys of some rows of a call, from the first of a block on."""
    offsets, positions, visible_from = lists
    if offsets is None or positions is None or visible_from is None:
        return lists
    blocks = -(-length // block)
    first, last = begin // block, -(-end // block)
    rows = [offsets[i + first : i + last + 1] for i in range(0, len(offsets) - 1, blocks)]
    entries = torch.cat([torch.arange(int(x[0]), int(x[-1])) for x in rows]).to(positions.device)
    sizes = torch.cat([x.diff() for x in rows])
    ends = torch.cat([offsets[:1], sizes.cumsum(0, dtype=torch.int32)])
    return ends, positions[entries], visible_from[entries]
