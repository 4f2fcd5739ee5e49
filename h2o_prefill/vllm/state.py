"""State of prompts in an engine: by request, and checkpoints by what their prompts begin with."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig

# The next memory set of a layer, its scores, and errors, as `LayerState.checkpoint` returns them.
Checkpoint = tuple[Tensor, Tensor, Tensor]


@dataclass
class PromptState:
    """State of all layers after the first `length` tokens of a prompt.

    Layers fill in while the engine runs the step that ends there or later.
    """

    config: PrefillConfig
    length: int = 0
    # Whether all calls so far began at multiples of the chunk size: the state is then a function of
    # the tokens alone, and other prompts may go on from it.
    aligned: bool = True
    layers: dict[int, Checkpoint] = field(default_factory=dict)  # those that are sparse
    copied: Any = None  # the event after which a device has copied them to the host, None: done

    def at(self, layer: int, device: torch.device) -> Checkpoint | None:
        """Return the checkpoint of a layer on a device, None if there is none."""
        checkpoint = self.layers.get(layer)
        if checkpoint is None or checkpoint[0].device == device:
            return checkpoint
        if self.copied is not None:
            self.copied.wait()  # The device does, not the host.
        memory, scores, errors = (x.to(device, non_blocking=True) for x in checkpoint)
        return memory, scores, errors

    def on_host(self) -> PromptState:
        """Return the state in the host's memory, where a device copies it beside other work."""
        device = next((x.device for x, _, _ in self.layers.values()), torch.device("cpu"))
        if device.type == "cpu":
            return self
        module, stream = torch.get_device_module(device), _stream_beside(device)
        stream.wait_stream(module.current_stream(device))
        layers: dict[int, Checkpoint] = {}
        with module.stream(stream):
            for layer, checkpoint in self.layers.items():
                for x in checkpoint:
                    x.record_stream(stream)  # Else its memory could be used again before.
                # PyTorch pins memory for such a copy.
                memory, scores, errors = (x.to("cpu", non_blocking=True) for x in checkpoint)
                layers[layer] = memory, scores, errors
        return replace(self, layers=layers, copied=stream.record_event())

    @property
    def errors(self) -> list[Tensor]:
        """The errors of all layers so far, each float32 [1, Hkv, 4]."""
        return [errors for _, _, errors in self.layers.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for layer in self.layers.values() for x in layer)

    def trim(self) -> None:
        """Copy the tensors without absent members, away from the other checkpoints of a call."""
        pin = self.copied is not None
        for layer, (memory, scores, errors) in self.layers.items():
            width = int((memory >= 0).sum(2).max())
            parts = memory[:, :, :width].clone(), scores[:, :, :width].clone(), errors.clone()
            memory, scores, errors = (x.pin_memory() if pin else x for x in parts)
            self.layers[layer] = memory, scores, errors
        self.copied = None


@functools.cache
def _stream_beside(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


class Checkpoints:
    """States of prompts by key, up to a number of bytes; the least recently used is removed.

    A state may be put before the step that fills it in has run: requests of the same step that go
    on from it run after it. `settle` counts the bytes of its trimmed tensors afterwards. Several
    `ranks` of one model count them untrimmed, since all ranks must remove the same states.
    """

    def __init__(self, max_bytes: int, ranks: int = 1) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes, self.ranks = max_bytes, ranks
        self._states: OrderedDict[bytes, PromptState] = OrderedDict()
        self._sizes: dict[bytes, int] = {}  # bytes of those that are counted
        self._whole: set[bytes] = set()  # those that are not trimmed

    def __len__(self) -> int:
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are counted."""
        return sum(self._sizes.values())

    def put(self, key: bytes, state: PromptState) -> None:
        """Keep a state, in the place of one of the same key: the model's weights may be others."""
        if self.max_bytes == 0:
            return
        self._sizes.pop(key, None)
        self._states[key] = state
        self._states.move_to_end(key)
        self._whole.add(key)

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()
        self._sizes.clear()
        self._whole.clear()

    def find(self, key: bytes) -> PromptState | None:
        """Return the state of a key, None if it is not there any more."""
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def settle(self) -> None:
        """Copy states of the last step to the host, trim copies, remove what is too much.

        Nothing waits for a device: copies that are under way are trimmed by a later call.
        """
        for key in [*self._whole]:
            state = self._states[key] = self._states[key].on_host()
            self._sizes.setdefault(key, state.nbytes)
            if state.copied is None or state.copied.query():
                state.trim()
                self._whole.remove(key)
                if self.ranks == 1:
                    self._sizes[key] = state.nbytes
        while self._states and self.nbytes > self.max_bytes:
            key, _ = self._states.popitem(last=False)
            self._sizes.pop(key)
            self._whole.discard(key)
