"""One prompt over several processes; each process has a consecutive range of chunks.

A range attends to a few rows before it: the memory sets, which the range before passes on after its
last chunk, and the recalled keys, which are known from the token ids before any layer runs. These
rows stand in for the whole past. All rules of the method (the last L, the first K, the lower of two
positions with equal scores, keys recalled before a chunk) depend on the order of positions alone,
so that operators take the rows as if nothing lay between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.distributed.exact_rows import ExactRows
from h2o_prefill.distributed.group import Ranks
from h2o_prefill.functional import RecallLists, lists_of_rows, merge_all
from h2o_prefill.state import PrefillState, no_errors, score_dtype


class MemoryRows(NamedTuple):
    """The memory sets that the next chunk of one layer attends to, with their rows.

    Attributes
    ----------
    positions : Tensor
        int32 [B, Hkv, M], ascending, then -1.
    scores : Tensor
        float32 (float64 for float64 keys) [B, Hkv, M]: attention that each position received so
        far.
    keys, values : Tensor
        [B, Hkv, M, D] and [B, Hkv, M, Dv].
    errors : Tensor
        `PrefillState.errors`, on which M depends.
    """

    positions: Tensor
    scores: Tensor
    keys: Tensor
    values: Tensor
    errors: Tensor


@dataclass(frozen=True)
class ShardPlan:
    """Which tokens each process has, and which keys each of them needs from the ones before.

    Attributes
    ----------
    bounds : sequence of (int, int)
        First token of each process, and the one after its last.
    recalled : sequence of Tensor
        int64, ascending: positions before its range that lexical recall names for a process.
    """

    bounds: Sequence[tuple[int, int]]
    recalled: Sequence[Tensor]

    @classmethod
    def of(cls, length: int, count: int, config: PrefillConfig, recall: RecallLists) -> ShardPlan:
        """Spread a prompt of `length` tokens evenly over `count` processes, in whole chunks.

        `recall` are the lists of the whole prompt. Raises ValueError if a process would have fewer
        tokens than a sparse call.
        """
        size, chunks = config.chunk_size, length // config.chunk_size
        begins = [size * (chunks * number // count) for number in range(count)]
        bounds = list(zip(begins, [*begins[1:], length], strict=True))
        least = max(config.sparse_from, 2)
        if min(end - begin for begin, end in bounds) < least:
            raise ValueError(
                f"the prompt must have {least} tokens or more for each of {count} processes, in "
                f"chunks of {size}, got {length}"
            )
        recalled = []
        for begin, end in bounds:
            _, named, _ = lists_of_rows(recall, length, begin, end, config.recall_block)
            found = torch.empty(0) if named is None else torch.unique(named)
            recalled.append(found[found < begin].long())
        return cls(bounds, recalled)

    def needed(self, number: int, whole: bool) -> Tensor:
        """Return the positions whose keys a process needs: of all tokens before it if `whole`."""
        return torch.arange(self.bounds[number][0]) if whole else self.recalled[number]

    def sent(self, sender: int, receiver: int, whole: bool) -> Tensor:
        """Return the needed positions that `sender` holds, as offsets into its range."""
        begin, end = self.bounds[sender]
        needed = self.needed(receiver, whole)
        return needed[(needed >= begin) & (needed < end)] - begin


class CompactPast:
    """The rows that a range of chunks can see of the past of one layer, without gaps.

    Parameters
    ----------
    begin : int
        The first position of the range.
    needed : Tensor
        int64 [n], ascending: positions whose rows are here in all heads.
    key, value : Tensor
        Their keys [B, Hkv, n, D] and values [B, Hkv, n, Dv].
    memory : MemoryRows, optional
        The memory sets at `begin`.

    Attributes
    ----------
    table : Tensor
        int64 [P], ascending: the positions of the rows.
    keys, values : Tensor
        [B, Hkv, P, D] and [B, Hkv, P, Dv]; a row that is in the memory set of another head alone
        is 0.
    state : PrefillState, optional
        Scores and memory sets with the numbers of the rows in place of their positions; None
        without memory sets.
    """

    def __init__(
        self, begin: int, needed: Tensor, key: Tensor, value: Tensor, memory: MemoryRows | None
    ) -> None:
        rows = None if memory is None else tuple(memory)
        self._native = torch.classes.h2o_prefill.CompactPast(begin, needed, key, value, 0, rows)
        self.table: Tensor = self._native.table()
        self.keys: Tensor = self._native.keys()
        self.values: Tensor = self._native.values()
        state = self._native.state()
        self.state = None if state is None else PrefillState.of(state)

    def recall_lists(self, lists: RecallLists) -> RecallLists:
        """Return lists of recalled keys with the numbers of rows in place of positions."""
        if lists[0] is None:
            return lists
        return self._native.recall_lists(lists)

    def memory_rows(
        self, state: PrefillState, keys: Tensor, values: Tensor, config: PrefillConfig
    ) -> MemoryRows:
        """Return the memory sets after the range, which the next one begins with.

        `state`, keys and values [B, Hkv, P + T, D] cover the past and the range; `config` holds the
        settings of the layer.
        """
        return MemoryRows(*self._native.memory_rows(state.fields, keys, values, config.native))

    def whole_state(self, state: PrefillState) -> PrefillState:
        """Return the state after the range with positions; scores of evicted ones are 0."""
        return PrefillState.of(self._native.whole_state(state.fields))


class SequencePrefill:
    """What one process sends and receives while all of them prefill one prompt.

    Rows go to those that need them as soon as they are there; nothing is exchanged by all at once,
    so that a process can be layers ahead of the next one.

    Parameters
    ----------
    ranks : Ranks
        The processes in the order of their ranges.
    plan : ShardPlan
        What each of them has and needs.
    recall : tuple of Tensor
        The lists of recalled keys of the own range.
    exact : ExactRows, optional
        Rows in which errors are measured.

    Attributes
    ----------
    bytes_sent : int
        Bytes of keys, values and memory sets that were sent so far.
    """

    def __init__(
        self, ranks: Ranks, plan: ShardPlan, recall: RecallLists, exact: ExactRows | None = None
    ) -> None:
        self.ranks, self.plan, self.recall, self.exact = ranks, plan, recall, exact
        self.bytes_sent = 0
        self.begin, self.end = plan.bounds[ranks.number]
        # Messages under way: what waits for each, and its layer.
        self._sent: deque[tuple[Callable[[], None], int]] = deque()

    def past_of(
        self, layer: int, key: Tensor, value: Tensor, config: PrefillConfig | None
    ) -> CompactPast:
        """Send rows of a layer to the processes that need them; return the rows of earlier ranges.

        `key` and `value` belong to this range, `config` holds the settings of the layer. Without
        settings the layer attends to all earlier tokens.
        """
        whole, number = config is None, self.ranks.number
        for receiver in range(number + 1, self.ranks.count):
            rows = self.plan.sent(number, receiver, whole).to(key.device)
            if rows.numel():
                self._send(receiver, layer, key[:, :, rows], value[:, :, rows])
        keys, values = [key[:, :, :0]], [value[:, :, :0]]
        for sender in range(number):
            count = self.plan.sent(sender, number, whole).numel()
            if count:
                shape = (*key.shape[:2], count)
                keys.append(key.new_empty(*shape, key.shape[3]))
                values.append(value.new_empty(*shape, value.shape[3]))
                self._receive(sender, layer, keys[-1], values[-1])
        memory = None
        if number > 0 and config is not None and config.memory_size:
            memory = self._receive_memory(layer, key, value, config)
        needed = self.plan.needed(number, whole)
        return CompactPast(self.begin, needed, torch.cat(keys, 2), torch.cat(values, 2), memory)

    def pass_on(self, layer: int, memory: MemoryRows) -> None:
        """Send the memory sets after this range to the next process, the errors first."""
        self._send(self.ranks.number + 1, layer, memory.errors)
        self._send(self.ranks.number + 1, layer, *memory[:-1])

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        while self._sent:
            self._sent.popleft()[0]()
        if self.exact is not None:
            self.exact.finish()

    def merge(self, out: Tensor, lse: Tensor, layer: int) -> Tensor:
        """Merge attention [B, Hq, T, Dv] to the tokens of each process, with its lse [B, Hq, T].

        All processes get the same result, to the bit.
        """
        mine = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1)
        parts = [torch.empty_like(mine) for _ in range(self.ranks.count)]
        with self.ranks.waiting(layer=layer):
            dist.all_gather(parts, mine, group=self.ranks.group)
        merged, _ = merge_all((part[..., :-1], part[..., -1]) for part in parts)
        return merged.to(out.dtype)

    def _receive_memory(
        self, layer: int, key: Tensor, value: Tensor, config: PrefillConfig
    ) -> MemoryRows:
        errors, sender = no_errors(key), self.ranks.number - 1
        self._receive(sender, layer, errors)
        shape = (*key.shape[:2], config.native.memory_width(errors))
        memory = MemoryRows(
            key.new_empty(shape, dtype=torch.int32),
            key.new_empty(shape, dtype=score_dtype(key)),
            key.new_empty(*shape, key.shape[3]),
            value.new_empty(*shape, value.shape[3]),
            errors,
        )
        self._receive(sender, layer, *memory[:-1])
        return memory

    def _send(self, receiver: int, layer: int, *tensors: Tensor) -> None:
        message = torch.cat([_bytes(x.contiguous()) for x in tensors])
        self._sent.append((self.ranks.send(receiver, message, layer, tag=layer), layer))
        self.bytes_sent += message.numel()
        # The farther a process is, the later it asks.
        while layer - self._sent[0][1] > self.ranks.count:
            self._sent.popleft()[0]()

    def _receive(self, sender: int, layer: int, *tensors: Tensor) -> None:
        sizes = [x.numel() * x.element_size() for x in tensors]
        message = tensors[0].new_empty(sum(sizes), dtype=torch.uint8)
        self.ranks.receive(sender, message, layer, tag=layer)
        for tensor, part in zip(tensors, message.split(sizes), strict=True):
            _bytes(tensor).copy_(part)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
