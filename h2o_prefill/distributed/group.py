"""A group of processes that prefill one prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


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
    """The processes of a group, in order: a ProcessGroup, or a DeviceMesh of one dimension.

    None stands for all processes. `layers` are the model's layers in this process, for error
    messages. Raises ValueError if a mesh has several dimensions.
    """

    def __init__(self, group: Any, layers: range) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a mesh of one dimension, got {group.ndim}")
            group = group.get_group()
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
