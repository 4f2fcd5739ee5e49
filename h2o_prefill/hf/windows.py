"""Exact attention of layers with a sliding window, or chunks, without their masks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.functional import LogitOptions
from h2o_prefill.hf.padding import Padding


@dataclass(frozen=True, eq=False)
class Window:
    """What the mask of a window would have said, which our mask function has left out."""

    queries: int  # of the call
    keys: int  # what the cache keeps of the history, and the call's tokens
    end: int  # position after the last key
    padding: Padding | None
    # Makes the mask that the model's own attention implementation takes.
    make_mask: Callable[[], Any]


# Windows whose masks were left out before the forward: `generate` makes those of static caches.
windows_ahead: ContextVar[dict[int, Window]] = ContextVar("h2o_prefill_windows", default={})  # noqa: B039


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, options: LogitOptions
) -> Tensor:
    """Attend to the last `window` keys of each query; the last key is that of the last query."""
    if query.shape[2] == 1 or window >= key.shape[2]:
        # All rows see the same first key: plain causal attention, which may be PyTorch's.
        return ops.dense_attention(query, key[:, :, -window:], value[:, :, -window:], *options)
    return ops.sliding_window_attention(query, key, value, window, *options)[0]


def attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, size: int, end: int, options: LogitOptions
) -> Tensor:
    """Attend causally inside chunks of `size` positions; `end` is that after the last key."""
    first_query, first_key = end - query.shape[2], end - key.shape[2]
    parts, begin = [], first_query
    while begin < end:
        chunk = begin // size * size
        stop = min(chunk + size, end)
        rows = query[:, :, begin - first_query : stop - first_query]
        seen = slice(max(chunk - first_key, 0), stop - first_key)
        parts.append(ops.dense_attention(rows, key[:, :, seen], value[:, :, seen], *options))
        begin = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
