"""Cache layers that sparse prefill works on in place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, StaticLayer

from h2o_prefill import ops
from h2o_prefill.functional import LayerOptions
from h2o_prefill.state import LayerState, no_errors, score_dtype, with_room

# Attention and a recurrence in one layer; its bases contradict each other in types.
HybridLayer: Any = cache_utils.LinearAttentionAndFullAttentionLayer

# What this thread is in. `context`: the running forward of an enabled model; `prompt`: the prompt
# that a caller of the model, such as `generate`, is working on. Dynamo may read the others. `call`:
# the forward, None if it cannot be in a graph; `layer`: the cache layer that was updated last, to
# which the next attention belongs. Dynamo reads attributes of a thread's own alone, so this is no
# class with defaults.
running = threading.local()


class ChunkedPrefillLayer(DynamicLayer):
    """Keys and values of one layer, with the scores and memory set of its prefill.

    `state` has all of them, in buffers that grow by doubling: a decoded token copies no history.
    `keys` and `values` are views of what is in use; code that sets others replaces them in
    the state.
    """

    def __init__(self, checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.checkpoints = checkpoints
        self.state = LayerState(checkpoints)
        # What `keys` and `values` were set to from the state.
        self._views: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            # Autograd does not follow what is written in place.
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if value_states.dtype != key_states.dtype:  # Autocast leaves the keys in float32.
            value_states = value_states.to(key_states.dtype)
        views = self.synchronized().append(key_states, value_states)
        self.keys, self.values = self._views = views
        return views

    def synchronized(self) -> Any:
        """Return the state, with the keys and values that the layer has now."""
        views = self._views or (None, None)
        if self.keys is not views[0] or self.values is not views[1]:
            if self.get_seq_length() and self.keys is not None and self.values is not None:
                self.state.set_keys(self.keys.detach(), self.values.detach())
                self._use_state()
            elif views[0] is not None:
                self.state.reset()
        return self.state

    def set_state(self, state: Any) -> None:
        """Continue from a state with keys and values."""
        self.lazy_initialization(state.key, state.value)
        self.state = state
        self._use_state()

    def _use_state(self) -> None:
        self.keys, self.values = self._views = self.state.key, self.state.value

    def _change(self, change: Callable[[Any], None]) -> None:
        """Change the state, if the layer has tokens."""
        if self.get_seq_length():
            change(self.synchronized())
            self._use_state()

    def crop(self, tokens_to_remove: int) -> None:
        state = self.synchronized()
        super().crop(tokens_to_remove)
        state.truncate(self.get_seq_length())
        if self.is_initialized:
            self._use_state()

    def reset(self) -> None:
        self.state, self._views = LayerState(self.checkpoints), None
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda state: state.select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.repeat(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda state: state.select(torch.arange(len(state.key))[indices.cpu()]))

    def offload(self) -> None:
        self._change(lambda state: state.to(torch.device("cpu")))

    def prefetch(self) -> None:
        self._change(lambda state: state.to(self.device))

    def __getstate__(self) -> dict[str, Any]:
        self.synchronized()
        views = ("keys", "values", "_views")
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self.keys = self.values = self._views = None
        if self.is_initialized and self.state.key is not None:
            self._use_state()


class StaticPrefillLayer(StaticLayer):
    """Keys and values of one layer, with the scores and memory set of its prefill."""

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len)
        # The state [B, Hkv, ...] as `ops.prefill_attention_` takes it.
        self.scores: Any = None
        self.memory: Any = None
        self.errors: Any = None
        self.updated = False  # whether tokens of a call wait for its attention
        self.attended = False  # whether `attend` was called in the forward that is under way
        self.memory_size = 0  # room for the memory sets of all forwards so far

    def prepare(self, memory_size: int, is_first: bool) -> None:
        """Make room for the memory sets of a forward, the first of a prompt or a later one."""
        self.updated = self.attended = False
        self.memory_size = max(self.memory_size, memory_size)
        if self.is_initialized and (self.scores is None or self.scores.device != self.device):
            self._allocate()
        elif self.memory is not None:
            # If the settings have changed since, a larger set continues from the smaller one.
            self.memory = with_room(self.memory, self.memory_size)
        if is_first and self.scores is not None:
            for tensor, empty in ((self.scores, 0), (self.memory, -1), (self.errors, 0)):
                tensor.fill_(empty)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._allocate()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        value_states = value_states.to(key_states.dtype)  # Autocast leaves the keys in float32.
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.updated = True
        if torch.compiler.is_dynamo_compiling():
            running.layer = self
        return keys, values

    def attend(self, query: Tensor, position: Tensor, options: LayerOptions) -> Tensor:
        """Attend with the first tokens of those that `update` has just written."""
        assert self.keys is not None
        self.updated, self.attended = False, True
        state: Any = self.keys, self.values, self.scores, self.memory, self.errors, position
        query = query.to(self.keys.dtype)
        return ops.prefill_attention_(query, None, None, *state, *options.arguments)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.scores is not None:
            state, rows = (self.scores, self.memory, self.errors), beam_idx.to(self.device)
            self.scores, self.memory, self.errors = (x.index_select(0, rows) for x in state)

    def _allocate(self) -> None:
        assert self.keys is not None
        shape = self.keys.shape[:3]
        self.scores = self.keys.new_zeros(shape, dtype=score_dtype(self.keys))
        self.memory = self.keys.new_full((*shape[:2], self.memory_size), -1, dtype=torch.int32)
        self.errors = no_errors(self.keys)
        if not torch.compiler.is_dynamo_compiling():
            for buffer in (self.scores, self.memory, self.errors):
                torch._dynamo.mark_static_address(buffer)


class ChunkedPrefillHybridLayer(ChunkedPrefillLayer, HybridLayer):
    """A `ChunkedPrefillLayer` with the states of a convolution and a recurrence."""

    def reorder_cache(self, beam_idx: Any) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        super().reorder_cache(beam_idx)

    def offload(self) -> None:
        LinearAttentionLayer.offload(self)
        super().offload()

    def prefetch(self) -> None:
        LinearAttentionLayer.prefetch(self)
        super().prefetch()


def prefill_layer_for(layer: Any, checkpoints: bool = False) -> Any:
    """Return a layer that keeps the state of sparse prefill in the place of one that is empty."""
    if type(layer) is DynamicLayer:
        return ChunkedPrefillLayer(checkpoints)
    if type(layer) is HybridLayer:
        return ChunkedPrefillHybridLayer(number_of_states=layer.number_of_states)
    return layer
