"""Cache layers that sparse prefill works on in place."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import LayerOptions, attend_in_buffers
from h2o_prefill.state import Checkpoint, PrefillState, empty_checkpoints, empty_state, with_room

# Older versions of transformers have other caches for hybrid models: those keep no state.
HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
RecurrentLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)

# What dynamo may read of a thread. `call`: the forward that is under way, None if it cannot be in a
# graph. `layer`: the cache layer that was updated last, to which the next attention belongs.
# Dynamo reads attributes of a thread's own alone, so this is no class with defaults.
graph = threading.local()

# Tokens that a new buffer has room for beyond those it is made for.
_SPARE_TOKENS = 256

# Held while a layer begins to share its buffers: all that share them must know of each other.
_sharing = threading.Lock()


class SharedRows:
    """Which of the layers that share buffers may write where.

    Rows before `frozen` belong to all of them. Those after it are written by one layer at a time,
    the owner, up to `end`; another one may take its place once it is gone.
    """

    def __init__(self, owner: ChunkedPrefillLayer, frozen: int) -> None:
        self._owner = weakref.ref(owner)
        self._frozen = self._end = frozen
        self._lock = threading.Lock()

    def freeze(self, length: int) -> None:
        """Share the first rows with one more layer."""
        with self._lock:
            self._frozen, self._end = max(self._frozen, length), max(self._end, length)

    @torch.compiler.disable
    def claim(self, layer: ChunkedPrefillLayer, past: int, total: int) -> bool:
        """Return whether a layer may write rows from `past` to `total`: if so, no other may."""
        with self._lock:
            owner = self._owner()
            if past < self._frozen or (owner not in (layer, None) and past < self._end):
                return False
            self._owner, self._end = weakref.ref(layer), total
            return True

    def __reduce__(self) -> Any:
        # Copies of other kinds, and pickles, have buffers of their own.
        return type(None), ()


class ChunkedPrefillLayer(DynamicLayer):
    """Keys and values of one layer, with the scores and memory set of its prefill.

    Keys, values and scores lie in buffers that grow by doubling: a decoded token copies no history.
    `keys` and `values` are views of what is in use. `checkpoints` holds what the next chunk needs
    at multiples of the chunk size S, by position, as long as all calls began at one of them. There,
    `crop` gives the state of a prompt that was never longer.
    """

    def __init__(self, checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.checkpoints: dict[int, Checkpoint] | None = {} if checkpoints else None
        self._state: PrefillState | None = None
        self._scores: Tensor | None = None  # [B, Hkv, capacity], 0 after the state's length
        # Key and value buffers, and the views of them that `keys` and `values` were set to: code
        # that replaces the views no longer uses the buffers.
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._views: tuple[Tensor, Tensor] | None = None
        self._shared: SharedRows | None = None  # None if no other layer has these buffers

    @property
    def state(self) -> PrefillState | None:
        """Scores and memory set, None before the first sparse call.

        Its tensors are those that a later sparse call changes in place.
        """
        return self._state

    @state.setter
    def state(self, state: PrefillState | None) -> None:
        self._state = state
        self._scores = None

    def get_seq_length(self) -> int:
        # Shapes alone: in a compiled graph, a view beside the buffer that changes under it is an
        # alias that AOTAutograd cannot rebuild for dynamic shapes.
        return self.keys.shape[2] if self.keys is not None and self.keys.ndim == 4 else 0

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            # Autograd does not follow what is written in place.
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        total = past + key_states.shape[-2]
        buffers = self._room_for(total, key_states, value_states)
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:total] = new
        return self._use(total)

    def attend(
        self, query: Tensor, total: int, config: PrefillConfig, options: LayerOptions
    ) -> Tensor:
        """Attend sparsely with tokens that `update` has just appended, and keep the state."""
        new, of_layer = query.shape[2], config.of_layer(options.layer)
        past = total - new
        keys, values = self._room_for(self.get_seq_length(), *self.rows())
        scores, state = self._place_state(query, keys.shape[2], of_layer.memory_size)
        added = keys[:, :, past:total], values[:, :, past:total]
        position = torch.tensor([past, state.last_chunk_begin])
        buffers = keys, values, scores, state.memory, state.errors
        kept: list[Tensor] = []
        # With a dense tail, what follows it depends on where this call ends.
        before = None if config.dense_tail else self.checkpoints
        if before is not None and (past == 0 or past in before):
            kept = empty_checkpoints(new // config.chunk_size, state, of_layer.memory_size)
        out = attend_in_buffers(query, added, buffers, position, options, checkpoints=kept)
        for number, one in enumerate(zip(*kept, strict=True), 1):
            self._keep(past + number * config.chunk_size, Checkpoint(*one))
        begin = config.last_chunk_begin(past, new)
        self._state = PrefillState(scores[..., :total], state.memory, total, begin, state.errors)
        return out

    def exact_before(self, length: int) -> int:
        """Return the last length up to this one to which `crop` is exact."""
        length = min(length, self.get_seq_length())
        if self._state is None or length >= self._state.length:
            return length
        return max((p for p in self.checkpoints or () if p <= length), default=0)

    @property
    def errors(self) -> Tensor | None:
        """What `error_rows` measured so far, float32 [B, Hkv, 4]."""
        return None if self._state is None else self._state.errors

    def holds(self, key: Tensor, value: Tensor) -> bool:
        """Return whether keys and values are those that `update` returned."""
        return key is self.keys and value is self.values

    def begin_after(
        self, pieces: Sequence[tuple[Tensor, Tensor]], state: PrefillState | None, new: int
    ) -> None:
        """Fill an empty layer with keys, values and their state; leave room for `new` tokens."""
        self.lazy_initialization(*pieces[0])
        past = sum(key.shape[2] for key, _ in pieces)
        buffers = self._room_for(past + new, *pieces[0])
        for buffer, rows in zip(buffers, zip(*pieces, strict=True), strict=True):
            torch.cat(rows, dim=2, out=buffer[:, :, :past])
        self._use(past)
        self.state = state

    def leave_inference_mode(self) -> None:
        """Copy buffers that inference mode made and that may not change in place outside of it."""
        if self._is_backed() and self._buffers is not None and not _is_writable(self._buffers[0]):
            self._room_for(self.get_seq_length(), *self.rows())
            self._map_state(torch.clone)

    def branch(self, room: int) -> ChunkedPrefillLayer:
        """Return a copy that shares the buffers, which then have room for `room` more tokens."""
        with _sharing:
            if length := self.get_seq_length():
                self._room_for(length + room, *self.rows(), claims=False)
                self._shared = self._shared or SharedRows(self, length)
                self._shared.freeze(length)
            other = copy.copy(self)
            if not length:
                other._views = other._shared = None  # a buffer without tokens is not shared
            other.state = None if self._state is None else self._state.clone()
            if self.checkpoints is not None:
                other.checkpoints = dict(self.checkpoints)
            return other

    def leave_buffers(self) -> None:
        """Copy keys, values and state out of buffers that have room for more tokens."""
        self.keys, self.values = (x.clone() for x in self.rows())
        self._buffers = self._views = self._shared = None
        self._map_state(torch.clone)

    def leave_shared(self) -> None:
        """Copy buffers that other layers share."""
        if self._shared is not None:
            self._views = None
            self._room_for(self.get_seq_length(), *self.rows())

    def crop(self, tokens_to_remove: int) -> None:
        backed, before = self._is_backed(), self.get_seq_length()
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        if backed and length < before:
            self._use(length)
        self._truncate_state(length)

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.state = None
        self.checkpoints = None if self.checkpoints is None else {}
        self._buffers = self._views = self._shared = None
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_state(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_state(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_state(lambda x: x[indices, ...])

    def offload(self) -> None:
        super().offload()
        self._map_state(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self._map_state(lambda x: x.to(self.device))

    def rows(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _is_backed(self) -> bool:
        """Return whether keys and values are views of the buffers."""
        return self._views is not None and self.holds(*self._views)

    def _use(self, length: int) -> tuple[Tensor, Tensor]:
        """Make keys and values views of the first rows of the buffers, and return them."""
        assert self._buffers is not None
        key, value = (buffer[:, :, :length] for buffer in self._buffers)
        self.keys, self.values = key, value
        self._views = key, value
        return key, value

    def _room_for(self, total: int, *like: Tensor, claims: bool = True) -> tuple[Tensor, Tensor]:
        """Return buffers that begin with the layer's tokens, and have room for `total`.

        `claims`: the rows after those tokens will be written.
        """
        past, shared, held = self.get_seq_length(), self._shared, 0
        if self._buffers is not None and self._is_backed():
            held = self._buffers[0].shape[2]
            if total <= held and all(map(_is_writable, self._buffers)):
                if not claims or total <= past or shared is None:
                    return self._buffers
                if shared.claim(self, past, total):
                    return self._buffers
        # A copy that leaves inference mode keeps its size; one for more tokens at least doubles it.
        return self._move(held if total <= held else max(total + _SPARE_TOKENS, 2 * held), *like)

    def _move(self, capacity: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Return new buffers, which begin with what the layer holds."""
        key, value = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in like)
        past = self.get_seq_length()
        for buffer, old, x in zip((key, value), self.rows() if past else (), like, strict=False):
            if (*old.shape[:2], old.shape[3]) != (*x.shape[:2], x.shape[3]):
                raise ValueError(
                    f"new keys and values must be like those in the cache, {list(old.shape)} "
                    f"but for the length, got {list(x.shape)}"
                )
            buffer[:, :, :past] = old
        self._buffers, self._shared = (key, value), None
        if past:
            self._use(past)
        return key, value

    def _place_state(
        self, query: Tensor, capacity: int, memory_size: int
    ) -> tuple[Tensor, PrefillState]:
        """Return scores with room for `capacity` and the state, both to be changed in place."""
        key, _ = self.rows()
        state = empty_state(key) if self._state is None else self._state
        scores = self._scores
        if scores is None or scores.shape[2] < capacity or not _is_writable(scores):
            scores = state.scores.new_zeros((*key.shape[:2], capacity), device=query.device)
            scores[..., : state.length] = state.scores
            self._scores = scores
        # If the settings have changed since, a larger set continues from the smaller one.
        memory = with_room(state.memory.to(query.device), memory_size)
        state.memory, state.errors = _writable(memory), _writable(state.errors.to(query.device))
        return scores, state

    def _truncate_state(self, length: int) -> None:
        state = self._state
        if state is None or length >= state.length:
            return
        if self.checkpoints is not None:
            self.checkpoints = {p: x for p, x in self.checkpoints.items() if p <= length}
            if length in self.checkpoints:
                self.state = self.checkpoints[length].state(length)
                return
        if self._scores is not None and _is_writable(self._scores):
            self._scores[..., length : state.length] = 0
        else:
            self._scores = None
        self._state = state.truncated(length)
        if self._state is None:
            self._scores = None

    def _map_state(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._state is not None:
            self.state = self._state.map(change)
        if self.checkpoints is not None:
            self.checkpoints = {p: x.map(change) for p, x in self.checkpoints.items()}

    def _keep(self, length: int, checkpoint: Checkpoint) -> None:
        """Keep a copy of a checkpoint, as wide as its largest set."""
        assert self.checkpoints is not None
        width = int((checkpoint.memory >= 0).sum(-1).max())
        narrow = checkpoint.memory[..., :width], checkpoint.scores[..., :width]
        self.checkpoints[length] = Checkpoint(*narrow, checkpoint.errors).map(_packed)


def _packed(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _writable(tensor: Tensor) -> Tensor:
    """Return a tensor that an operator may change in place, a copy if it is not one."""
    return tensor if tensor.is_contiguous() and _is_writable(tensor) else _packed(tensor)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether a tensor may change in place: one of inference mode only inside of that."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def prefill_layer_for(layer: Any, checkpoints: bool = False) -> Any:
    """Return a layer that keeps the state of sparse prefill in the place of one that is empty."""
    if type(layer) is DynamicLayer:
        return ChunkedPrefillLayer(checkpoints)
    if type(layer) is HybridLayer:
        return ChunkedPrefillHybridLayer(layer.number_of_states)
    return layer


if HybridLayer is not None:

    def _of_both(name: str) -> Callable[..., None]:
        # The base class calls `DynamicLayer` directly, past the methods of `ChunkedPrefillLayer`.
        def method(self: Any, *args: Any) -> None:
            getattr(RecurrentLayer, name)(self, *args)
            getattr(ChunkedPrefillLayer, name)(self, *args)

        return method

    class ChunkedPrefillHybridLayer(HybridLayer, ChunkedPrefillLayer):
        """A `ChunkedPrefillLayer` with the states of a convolution and a recurrence."""

        def __init__(self, number_of_states: int = 1) -> None:
            ChunkedPrefillLayer.__init__(self)
            HybridLayer.__init__(self, number_of_states)

        reset = _of_both("reset")
        crop = _of_both("crop")
        reorder_cache = _of_both("reorder_cache")
        offload = _of_both("offload")
        prefetch = _of_both("prefetch")
