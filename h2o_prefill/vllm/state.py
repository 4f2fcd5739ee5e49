"""State of prompts in an engine: by request, and checkpoints by what their prompts begin with."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import next_memory
from h2o_prefill.state import Checkpoint, PrefillState


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
    layers: dict[int, PrefillState | Checkpoint] = field(default_factory=dict)

    def at(self, layer: int) -> PrefillState | None:
        """Return the state of a layer, None before the first token."""
        if self.length == 0:
            return None
        held = self.layers[layer]
        return held.state(self.length) if isinstance(held, Checkpoint) else held

    def keep(self, layer: int, state: PrefillState) -> None:
        """Keep the state of a layer after `length` tokens."""
        self.layers[layer] = state
        if self.length % self.config.chunk_size == 0:
            memory = next_memory(state, self.config.of_layer(layer))
            scores = state.scores.gather(2, memory.clamp(min=0).long()).masked_fill(memory < 0, 0)
            self.layers[layer] = Checkpoint(memory, scores, state.errors)

    @property
    def nbytes(self) -> int:
        values = (x for layer in self.layers.values() for x in vars(layer).values())
        return sum(x.nbytes for x in values if isinstance(x, Tensor))


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
