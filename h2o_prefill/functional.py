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
