"""State of prompts in an engine: by request, and checkpoints by what their prompts begin with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import LayerState


@dataclass
class PromptState:
    """State of all layers after the first `length` tokens of a prompt.

    Layers fill in while the engine runs the step that ends at `length`. At a multiple of the chunk
    size they hold a checkpoint, elsewhere the scores of all tokens.
    """

    config: PrefillConfig
    length: int = 0
    # Whether all calls so far began at multiples of the chunk size: the state is then a function of
    # the tokens alone, and other prompts may go on from it.
    aligned: bool = True
    layers: dict[int, Any] = field(default_factory=dict)

    def at(self, layer: int) -> Any:
        """Return the `LayerState` of a layer, None before the first token."""
        if self.length == 0:
            return None
        state = self.layers[layer]
        return LayerState.at_checkpoint(self.length, *state) if isinstance(state, tuple) else state

    def keep(self, layer: int, state: Any) -> None:
        """Keep the state of a layer after `length` tokens."""
        if self.length % self.config.chunk_size == 0:
            state = state.checkpoint(layer, self.config.to_string())
        self.layers[layer] = state

    @property
    def errors(self) -> list[Tensor]:
        """The errors of all layers so far, each float32 [1, Hkv, 4]."""
        return [x[2] if isinstance(x, tuple) else x.errors for x in self.layers.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        states = self.layers.values()
        tensors = [x if isinstance(x, tuple) else x.tensors() for x in states]
        return sum(x.nbytes for one in tensors for x in one)


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
        """Count the states of the last step, and remove what is too much."""
        self.nbytes += sum(self._states[key].nbytes for key in self._uncounted)
        self._uncounted.clear()
        while self._states and self.nbytes > self.max_bytes:
            _, state = self._states.popitem(last=False)
            self.nbytes -= state.nbytes
