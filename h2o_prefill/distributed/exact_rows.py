"""Exact attention of a few rows of each range to the tokens of all ranges before it.

Errors of sparse attention are measured in these rows. Their queries go to the processes that have
the keys, and partial results come back: a process answers in a thread for each later one, since it
is layers ahead by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.distributed.group import Ranks
from h2o_prefill.functional import LogitOptions, attend_to_all

# A result, and the lse of its softmax.
Partial = tuple[Tensor, Tensor]

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
        later = range(ranks.number + 1, ranks.count)
        self._threads = [
            threading.Thread(target=self._serve, args=(x,), daemon=True) for x in later
        ]
        for thread in self._threads:
            thread.start()

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
        works = []
        for number in range(self.ranks.number):
            with self.ranks.waiting(lambda: number, layer):  # noqa: B023
                to = self.ranks.rank_of(number)
                works.append(dist.isend(message, to, self.ranks.group, tag=_tag(layer, _QUERY)))

        def wait() -> Partial | None:
            merged: Partial | None = None
            for number, work in enumerate(works):
                with self.ranks.waiting(lambda: number, layer):  # noqa: B023
                    shape = (*message.shape[:3], value.shape[3] + 1)
                    part = torch.empty(shape, dtype=torch.promote_types(query.dtype, torch.float32))
                    source = self.ranks.rank_of(number)
                    dist.recv(part, source, self.ranks.group, tag=_tag(layer, _ANSWER))
                    assert work is not None
                    work.wait()
                found = part[..., :-1].to(query.device), part[..., -1].to(query.device)
                merged = found if merged is None else ops.merge_states(*merged, *found)
            return merged

        return wait

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
        rank, group, count = self.ranks.rank_of(number), self.ranks.group, len(self.rows[number])
        try:
            for layer in self.layers if count else ():
                with self._offered:
                    self._offered.wait_for(lambda: self._stopped or layer in self._offers)  # noqa: B023
                    if self._stopped:
                        return
                    key, value, options, like = self._offers[layer]
                with self.ranks.waiting(lambda: number, layer), torch.no_grad():
                    shape = (*like.shape[:2], count, like.shape[3])
                    query = torch.empty(shape, dtype=like.dtype)
                    dist.recv(query, rank, group, tag=_tag(layer, _QUERY))
                    out, lse = attend_to_all(query.to(like.device), key, value, options)
                    answer = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1).cpu()
                    dist.send(answer, rank, group, tag=_tag(layer, _ANSWER))
        except BaseException as error:
            self._error = error


def _tag(layer: int, kind: int) -> int:
    # Rows of a layer have its number as their tag.
    return (layer + 1) * 100_000 + kind
