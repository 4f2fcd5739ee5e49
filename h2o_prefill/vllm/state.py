"""State of prompts in an engine: by request, and checkpoints by what their prompts begin with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

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
        for layer, (memory, scores, errors) in self.layers.items():
            width = int((memory >= 0).sum(2).max())
            memory, scores = memory[:, :, :width].clone(), scores[:, :, :width].clone()
            self.layers[layer] = memory, scores, errors.clone()


class Checkpoints:
    """States of prompts by key, up to a number of bytes; the least recently used is removed.

    A state may be put before the step that fills it in has run: requests of the same step that go
    on from it run after it. `settle` counts its bytes afterwards.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._states: OrderedDict[bytes, PromptState] = OrderedDict()
        self._uncounted: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._states)

    def put(self, key: bytes, state: PromptState) -> None:
        """Keep a state, in the place of one of the same key: the model's weights may be others."""
        if self.max_bytes == 0:
            return
        if key in self._states and key not in self._uncounted:
            self.nbytes -= self._states[key].nbytes
        self._states[key] = state
        self._states.move_to_end(key)
        self._uncounted.add(key)

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()
        self._uncounted.clear()
        self.nbytes = 0

    def find(self, key: bytes) -> PromptState | None:
        """Return the state of a key, None if it is not there any more."""
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def settle(self) -> None:
        """Trim and count the states of the last step, and remove what is too much."""
        for key in self._uncounted:
            self._states[key].trim()
            self.nbytes += self._states[key].nbytes
        self._uncounted.clear()
        while self._states and self.nbytes > self.max_bytes:
            _, state = self._states.popitem(last=False)
            self.nbytes -= state.nbytes
