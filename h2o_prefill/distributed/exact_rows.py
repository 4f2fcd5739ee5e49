"""Exact attention of a few rows of each range to the tokens of all ranges before it.

Errors of sparse attention are measured in these rows. Their queries go to the processes that have
the keys, and partial results come back: a process answers in a thread for each later one, since it
is layers ahead by then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.distributed.group import Ranks
from h2o_prefill.functional import LogitOptions, attend_to_all, merge_all
from h2o_prefill.state import score_dtype

# A result, and the lse of its softmax.
Partial = Sequence[Tensor]

_QUERY, _ANSWER = 1, 2  # of the tags of a layer


class ExactRows:
    """What one process asks for and answers; messages go through the CPU.

    `ranks` are the processes in the order of their ranges, `rows` the measured rows of each of
    them (int64, ascending, counted from the first of its range), in these layers.
    """

    def __init__(self, ranks: Ranks, rows: Sequence[Tensor], layers: Sequence[int]) -> None:
        self.ranks, self.rows, self.layers = ranks, rows, layers
        self.own = rows[ranks.number]
        # Keys, values, options and a query of this process, by layer.
        self._offers: dict[int, tuple[Tensor, Tensor, LogitOptions, Tensor]] = {}
        self._offered = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._threads: list[threading.Thread] = []
        for later in range(ranks.number + 1, ranks.count):
            self._threads.append(threading.Thread(target=self._serve, args=(later,), daemon=True))
            self._threads[-1].start()

    def ask(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LogitOptions
    ) -> Callable[[], Partial | None]:
        """Ask for the exact attention of the own rows to all ranges before.

        `query` [B, Hq, T, D], `key` and `value` belong to this range; rows of later ranges attend
        to them from now on. Returns a function that waits for the answer, None if nothing is
        before.
        """
        with self._offered:
            self._offers[layer] = key, value, options, query[:, :, :0]
            self._offered.notify_all()
        if self.ranks.number == 0 or not len(self.own):
            return lambda: None
        message = query[:, :, self.own.to(query.device)].cpu().contiguous()
        ranks, tag = self.ranks, _tag(layer, _QUERY)
        sent = [ranks.send(number, message, layer, tag) for number in range(ranks.number)]

        @functools.cache
        def wait() -> Partial | None:
            parts = []
            shape = (*message.shape[:3], value.shape[3] + 1)
            for number, arrived in enumerate(sent):
                part = torch.empty(shape, dtype=score_dtype(query))
                part = ranks.receive(number, part, layer, _tag(layer, _ANSWER)).to(query.device)
                arrived()
                parts.append((part[..., :-1], part[..., -1]))
            return merge_all(parts)

        return wait

    def error(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        begin: int,
        options: LogitOptions,
        before: Callable[[], Partial | None],
    ) -> Tensor | None:
        """Return the error of a chunk whose sparse attention is `out` [B, Hq, n, Dv].

        It is the mean |out - exact|^2 / |exact|^2 of its own rows, for each KV head, [B, Hkv] on
        the CPU; None without such rows. Query, key and value belong to this range, in which the
        chunk begins at `begin`; `before` is what `ask` returned.
        """
        measured = (self.own >= begin) & (self.own < begin + out.shape[2])
        rows = self.own[measured].to(query.device)
        if not len(rows):
            return None
        earlier = before()
        parts = [] if earlier is None else [tuple(x[:, :, measured] for x in earlier)]
        parts += attend_to_range(query[:, :, rows], key, value, rows, begin, options)
        kind = score_dtype(query)
        exact, _ = merge_all((found.to(kind), lse.to(kind)) for found, lse in parts)
        sparse = out[:, :, rows - begin].to(exact.dtype)
        missed, whole = (x.square().sum(-1) for x in (sparse - exact, exact))
        ratio = torch.where(whole > 0, missed / whole, 0)
        return ratio.unflatten(1, (key.shape[1], -1)).mean(dim=(2, 3)).cpu()

    def finish(self) -> None:
        """Wait until all later processes have their answers; raise what went wrong with one."""
        for thread in self._threads:
            thread.join()
        self._offers.clear()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Answer no more."""
        with self._offered:
            self._stopped = True
            self._offered.notify_all()

    def _serve(self, number: int) -> None:
        """Answer a later process, layer by layer."""
        ranks, count = self.ranks, len(self.rows[number])
        try:
            for layer in self.layers if count else ():
                with self._offered:
                    self._offered.wait_for(lambda: self._stopped or layer in self._offers)  # noqa: B023
                    if self._stopped:
                        return
                    key, value, options, like = self._offers[layer]
                query = torch.empty((*like.shape[:2], count, like.shape[3]), dtype=like.dtype)
                query = ranks.receive(number, query, layer, _tag(layer, _QUERY)).to(like.device)
                with torch.no_grad():
                    out, lse = attend_to_all(query, key, value, options)
                answer = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1).cpu()
                ranks.send(number, answer, layer, _tag(layer, _ANSWER))()
        except BaseException as error:
            self._error = error


def measured_rows(config: PrefillConfig, begin: int, end: int) -> Tensor:
    """Return the rows of a range in which errors are measured, counted from its first."""
    found: list[int] = []
    for chunk in range(max(begin, config.chunk_size), end, config.chunk_size):
        rows = min(config.chunk_size, end - chunk)
        found += [chunk - begin + row for row in config.native.measured_rows(chunk, rows)]
    return torch.tensor(found, dtype=torch.int64)


def attend_to_range(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, begin: int, options: LogitOptions
) -> list[tuple[Tensor, ...]]:
    """Return the attention of rows of a chunk to its range, to the keys before `begin` and after.

    Row i of `query` [B, Hq, n, D] sees the keys up to rows[i].
    """
    parts, found = [], []
    if begin > 0:
        parts.append(attend_to_all(query, key[:, :, :begin], value[:, :, :begin], options))
    kind = score_dtype(query)
    keys, values = (x[:, :, begin : int(rows[-1]) + 1].to(kind) for x in (key, value))
    for i, row in enumerate(rows.tolist()):
        seen = row + 1 - begin
        held = query[:, :, i : i + 1].to(kind), keys[:, :, :seen], values[:, :, :seen]
        found.append(ops.sliding_window_attention(*held, seen, *options))
    return [*parts, tuple(torch.cat(x, dim=2) for x in zip(*found, strict=True))]


def _tag(layer: int, kind: int) -> int:
    # Rows of a layer have its number as their tag.
    return (layer + 1) * 100_000 + kind
