"""Prefill over several processes, on torch.distributed: chunks pass through the stages of a model.

This module knows modules and tensors alone: `h2o_prefill.hf` makes stages of transformers' models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

Note = Callable[[int], object]


class DistributedPrefillError(RuntimeError):
    """Another process of the group is gone, or did not answer within the group's timeout.

    Attributes
    ----------
    rank : int
        The process that raises, by its rank in the default group.
    layer : int
        Its layer next to the process that it waited for.
    peer : int or None
        The process that it waited for; None if it waited for all.
    """

    def __init__(self, rank: int, layer: int, peer: int | None, why: str = "") -> None:
        super().__init__(rank, layer, peer, why)
        self.rank, self.layer, self.peer, self.why = rank, layer, peer, why

    def __str__(self) -> str:
        peer = "the other ranks" if self.peer is None else f"rank {self.peer}"
        return f"rank {self.rank} waited at layer {self.layer} for {peer}: {self.why}"


class Ranks:
    """The processes of a group, in order; None stands for all processes.

    `layers` are the model's layers in this process, for error messages.
    """

    def __init__(self, group: Any, layers: range) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.layers = layers
        self.number, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_first, self.is_last = self.number == 0, self.number == self.count - 1

    def check_same(self, facts: dict[str, object]) -> None:
        """Raise ValueError, in every process, if a fact is not the same in all of them."""
        everyone: list[Any] = [None] * self.count
        with self.waiting():
            dist.all_gather_object(everyone, facts, group=self.group)
        for name in facts:
            for number, theirs in enumerate(everyone):
                if theirs.get(name) != everyone[0].get(name):
                    raise ValueError(
                        f"{name} must be the same on every rank, got {everyone[0].get(name)} on "
                        f"rank {self.rank_of(0)} and {theirs.get(name)} on {self.rank_of(number)}"
                    )

    def from_last(self, tensor: Tensor | None, device: torch.device) -> Any:
        """Return what the last process passed, on a device of this one."""
        shared = [None if tensor is None else tensor.cpu()]
        with self.waiting():
            dist.broadcast_object_list(shared, src=self.rank_of(self.count - 1), group=self.group)
        return None if shared[0] is None else shared[0].to(device)

    def rank_of(self, number: int) -> int:
        """Return the rank of a process in the default group."""
        return dist.get_global_rank(self.group, number)

    @contextlib.contextmanager
    def waiting(self, peer: Callable[[], int | None] | None = None) -> Iterator[None]:
        """Turn errors of communication in a block into `DistributedPrefillError`.

        `peer` returns the number of the process that is waited for, None if an error is of this
        process. Without it, all processes are waited for.
        """
        try:
            yield
        except RuntimeError as error:
            number = None if peer is None else peer()
            if peer is not None and number is None:
                raise
            before = number is not None and number < self.number
            layer = self.layers[0] if before or number is None else self.layers[-1]
            rank = None if number is None else self.rank_of(number)
            why = str(error).partition("\n")[0]
            raise DistributedPrefillError(dist.get_rank(), layer, rank, why) from error


class PipelinePrefill:
    """Prefill of a prompt by stages that work at the same time, each on another chunk.

    All processes of the group make one, and call the same methods with the same arguments. Keys,
    values, scores and memory sets stay where they are: from stage to stage go hidden states.

    Parameters
    ----------
    stage : nn.Module
        The layers of this process, with their cache. The first one takes tokens, [B, n] or
        [B, n, hidden size], the others the hidden states [B, n, hidden size] that the one before
        returned. The last one returns a tensor of any shape.
    group : ProcessGroup
        The processes in the order of their stages.
    layers : range
        The layers of this process, for errors.
    micro_batches : int
        Calls in a step of the schedule. A process holds the hidden states of one step, and is at
        most one step ahead of the next process.
    """

    def __init__(self, stage: nn.Module, group: Any, layers: range, micro_batches: int = 4) -> None:
        self.ranks = Ranks(group, layers)
        self.micro_batches = micro_batches
        self._stage = _KeepsResult(stage, self.ranks)
        self._ready = False  # whether neighbours have exchanged a first message

    def run(
        self, tokens: Tensor, hidden: Tensor, sizes: Sequence[int], note: Note | None = None
    ) -> Tensor:
        """Pass tokens through all stages, in calls of these sizes.

        Parameters
        ----------
        tokens : Tensor
            [B, T] or [B, T, hidden size]; read by the first process.
        hidden : Tensor
            [B, 0, hidden size]: dtype and device of the hidden states in this process.
        sizes : sequence of int
            Tokens of each call; their sum is T.
        note : callable, optional
            Called after each step with the number of tokens so far.

        Returns
        -------
        Tensor
            What the last stage returned for the last call, in every process.

        Raises
        ------
        DistributedPrefillError
            If another process is gone or does not answer within the group's timeout. The group
            cannot be used any more.
        """
        begin, shape = 0, None
        for step in _steps(sizes, self.micro_batches):
            size, count = step
            end = begin + size * count
            # Torch wants micro-batches without gaps: tokens come first, rows after them.
            part = tokens[:, begin:end].transpose(0, 1).contiguous()
            if step != shape:
                received = part[:size] if self.ranks.is_first else _of_length(hidden, size)
                stage = self._new_stage(received, _of_length(hidden, size), hidden.device)
                shape, schedule = step, ScheduleGPipe(stage, count)
            with self.ranks.waiting(stage.waits_for):
                # The next process may still work on this step while this one begins another.
                schedule.step(*([part] if self.ranks.is_first else []), return_outputs=False)
            begin = end
            if note is not None:
                note(end)
        return self.ranks.from_last(self._stage.result, hidden.device)

    def _new_stage(self, received: Tensor, returned: Tensor, device: torch.device) -> _Stage:
        # The last stage's result goes to no other stage: what it was given stands for it.
        returned = received if self.ranks.is_last else returned
        numbers = self.ranks.number, self.ranks.count
        stage = _Stage(self._stage, *numbers, device, received, returned, group=self.ranks.group)
        stage.greets, self._ready = not self._ready, True
        return stage


class _KeepsResult(nn.Module):
    """A stage; the last one keeps what it returns."""

    def __init__(self, stage: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.stage, self.ranks = stage, ranks
        self.result: Tensor | None = None

    def forward(self, received: Tensor) -> Tensor:
        tokens = received.transpose(0, 1).contiguous() if self.ranks.is_first else received
        returned: Tensor = self.stage(tokens)
        if not self.ranks.is_last:
            return returned.contiguous()
        self.result = returned
        return received


class _Stage(PipelineStage):
    """A stage of torch's pipeline that knows which process it waits for."""

    peer: int | None = None  # None while this process computes
    greets = True

    def waits_for(self) -> int | None:
        """Return the number of that process."""
        return self.peer

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.peer = None if self.is_first else self.stage_index - 1
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.peer = None if self.is_last else self.stage_index + 1
        return super().get_fwd_send_ops(fwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.peer = None
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            # The stage's own error, not torch's text around it.
            raise error.__cause__ or error from None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Once is enough. Neighbours answer each other, so a later exchange would let this process
        # wait until the next one has worked off all that it was sent.
        self.peer = self.stage_index + (1 if self.is_first else -1)
        return super()._get_init_p2p_neighbors_ops() if self.greets else []


def _steps(sizes: Sequence[int], micro_batches: int) -> Iterator[tuple[int, int]]:
    """Yield the size of the calls of each step, which are equal, and their number."""
    for size, calls in groupby(sizes):
        left = len(list(calls))
        while left:
            count = min(left, micro_batches)
            yield size, count
            left -= count


def _of_length(hidden: Tensor, length: int) -> Tensor:
    """Return hidden states of this length without memory."""
    return hidden.new_empty((hidden.shape[0], length, hidden.shape[2]), device="meta")
