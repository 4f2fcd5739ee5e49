"""Padded rows and windows whose masks are left out, and how to make these masks after all."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import LogitOptions

Span = tuple[int, int]
Rows = slice | list[int]  # an index of the batch
# Takes query, key and value of rows without padding, [b, H, n, D], their span, and which they are.
AttendRows = Callable[[Tensor, Tensor, Tensor, Span, Rows], Tensor]


@dataclass(frozen=True, eq=False)
class Padding:
    """A forward into an empty cache whose rows have padding on the left, on the right, or both."""

    length: int  # tokens of the call, padding included: queries and keys
    spans: tuple[Span, ...]  # first token and end of every row; equal where a row is all padding
    # Makes the mask that the model's own attention implementation takes.
    make_mask: Callable[[], Any]
    # The window of a sliding or chunked layer that longer rows do not fit into.
    window: int | None = None

    def fits(self, span: Span) -> bool:
        """Return whether a row attends to all of its tokens: no window cuts it."""
        return self.window is None or span[1] - span[0] <= self.window

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attend_rows: AttendRows) -> Tensor:
        """Attend with every row as if it were alone; return [B, T, Hq, Dv], 0 in padding.

        The operators take rows of one length, so those that lie in the same place go together.
        """
        batch, heads, length = query.shape[:3]
        out = query.new_zeros(batch, length, heads, value.shape[3])
        for (first, end), rows in self.groups().items():
            q, k, v = (x[:, :, first:end][rows] for x in (query, key, value))
            out[rows, first:end] = attend_rows(q, k, v, (first, end), rows).transpose(1, 2)
        return out

    def groups(self) -> dict[Span, Rows]:
        """Return the rows that lie in the same place, as an index of the batch; none is empty."""
        rows: dict[Span, list[int]] = {}
        for row, span in enumerate(self.spans):
            if span[0] < span[1]:
                rows.setdefault(span, []).append(row)
        return {span: _as_index(found) for span, found in rows.items()}

    def has_long_row(self, config: PrefillConfig, prompt_end: int | None = None) -> bool:
        """Return whether some row is sparse."""
        stop = self.length if prompt_end is None else prompt_end
        return any(
            self.fits((first, end)) and is_long_row(min(end, stop) - first, config)
            for first, end in self.spans
        )


def is_long_row(length: int, config: PrefillConfig) -> bool:
    """Return whether a row of a padded batch is sparse, as it is alone: longer than one chunk."""
    return length > config.chunk_size and config.is_long_call(0, length)


def is_unpadded(attention_mask: Tensor | None, length: int) -> bool:
    """Return whether none of the first keys is padding."""
    if attention_mask is None:
        return True
    return attention_mask.shape[-1] >= length and bool(attention_mask[:, :length].all())


def row_spans(attention_mask: Tensor, length: int) -> tuple[Span, ...] | None:
    """Return first token and end of every row, None if padding lies between tokens of a row."""
    real = attention_mask[:, :length].bool()
    real = torch.nn.functional.pad(real, (0, length - real.shape[1]))
    columns = torch.arange(length, device=real.device)
    bounds = torch.stack(
        [
            torch.where(real, columns, length).amin(dim=1),
            torch.where(real, columns + 1, 0).amax(dim=1),
            real.sum(dim=1),
        ],
        dim=1,
    ).tolist()  # one transfer from the device
    if any(tokens not in (0, end - first) for first, end, tokens in bounds):
        return None
    return tuple((first, end) if tokens else (0, 0) for first, end, tokens in bounds)


def _as_index(rows: list[int]) -> Rows:
    """Return neighbouring rows as a slice, which copies nothing."""
    begin, end = rows[0], rows[-1] + 1
    return slice(begin, end) if end - begin == len(rows) else rows


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
