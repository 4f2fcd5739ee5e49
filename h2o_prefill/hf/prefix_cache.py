"""Prompts that were prefilled, for prompts that begin as they do."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2o_prefill.hf.cache import ChunkedPrefillCache, branch_of
from h2o_prefill.hf.forward import announce
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer, RecurrentLayer
from h2o_prefill.hf.prefill import call_tokens, chunked_prefill, read_prompt
from h2o_prefill.identity import Origin
from h2o_prefill.state import Checkpoint, PrefillState

# Tokens that a found cache has room for, beyond its own and the rest of the prompt.
_ROOM = 256

# Layers whose rows of a chunk can be told from others, or that are small: those that keep all keys
# beside a recurrence are neither.
_STORED = (ChunkedPrefillLayer, DynamicSlidingWindowLayer, RecurrentLayer)


@dataclass(eq=False)
class _Chunk:
    """What a call of one chunk, after others, left in the layers of a cache."""

    # For each layer its keys and values [1, Hkv, S, D], and its state after them if it has one; or
    # the whole layer, where it is of another kind.
    layers: list[Any]
    nbytes: int


class PrefixCache:
    """Prefilled prompts; a prompt that begins as one of them prefills only the rest.

    The longest common beginning is reused in whole chunks, each of which came by a call of its own,
    so that results, to the bit, do not depend on what the cache holds. Prompts share the keys and
    values of common chunks. Of models with attention and a recurrence in one layer, as Falcon H1,
    nothing is stored. May be used by several threads.

    Parameters
    ----------
    max_bytes : int
        Most bytes of keys, values, states and token ids; above it, the least recently used chunks
        are removed.

    Raises
    ------
    ValueError
        If `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if not max_bytes >= 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        # By what is before them (an `Origin`, or a chunk) and their ids; the least recently used
        # first, and each before the one that it follows.
        self._chunks: OrderedDict[tuple[Origin | _Chunk, bytes], _Chunk] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values, states and token ids occupy, shared ones once."""
        return self._nbytes

    def prefill(self, model: Any, input_ids: Any) -> tuple[ChunkedPrefillCache, int]:
        """Prefill all chunks of a prompt but the last, and store them.

        Chunks go through the model one by one, as products of linear layers depend in their last
        bits on the number of tokens of a call. The rest is left to the caller: `generate` takes the
        whole prompt and the cache. A rest shorter than `min_prefill` attends densely. With
        `dense_tail` all of the prompt is left.

        Parameters
        ----------
        model : PreTrainedModel
            The model. One that is not enabled prefills nothing.
        input_ids : Tensor, list or mapping
            int64 [1, T], the whole prompt without padding, also as lists, or what a tokenizer
            returned.

        Returns
        -------
        ChunkedPrefillCache
            A cache with the beginning of the prompt, at most T - 1 tokens.
        int
            How many of its tokens were stored already: prefilled with this model, its weights,
            active adapters, settings, tokenizer and autocast dtype.

        Raises
        ------
        ValueError
            If `input_ids` is not of this form, or has ids beyond the vocabulary.
        """
        _, input_ids = read_prompt(input_ids, None, None, 0, model)
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must be [1, T], got {list(input_ids.shape)}")
        input_ids = input_ids.long()
        cache = ChunkedPrefillCache(config=model.config, checkpoints=True)
        enabled = enabled_of(model.config)
        if enabled is None:
            return cache, 0
        length, step = input_ids.shape[1], call_tokens(1, enabled.config)
        config = enabled.resolve(model, length)
        now = Origin(weakref.ref(model), config, enabled.marks(model))
        # What follows a dense tail depends on where its call ended.
        end = 0 if enabled.config.dense_tail else (length - 1) // step * step
        ids = [x.tobytes() for x in input_ids[0, :end].cpu().numpy().reshape(-1, step)]
        with self._lock:
            chunks = self._use(now, ids)
        past = len(chunks) * step
        if chunks:
            cache._origin = now
            cache.min_prefill = config.sparse_from if enabled.config.is_auto else None
            cache._token_ids = [input_ids[:, :past]]
            _fill(cache, chunks, step, length - past + _ROOM)

        def keep(done: int, _: int) -> None:
            layers: list[Any] = cache.layers
            if cache.token_ids is not None and all(type(layer) in _STORED for layer in layers):
                parts = [_part_of(layer, past + done - step) for layer in layers]
                whole = (vars(part) for part in parts if not isinstance(part, tuple))
                chunks.append(_Chunk(parts, _bytes_of([*parts, *whole]) + len(ids[0])))

        if past < end:
            with announce(enabled, length):
                new = input_ids[:, past:end]
                chunked_prefill(model, new, chunks_per_call=1, cache=cache, on_progress=keep)
            self._put(now, ids, chunks)
        return cache, past

    def clear(self) -> None:
        """Remove all chunks."""
        with self._lock:
            self._chunks.clear()
            self._nbytes = 0

    def _use(self, above: Origin | _Chunk, ids: list[bytes]) -> list[_Chunk]:
        """Return the stored chunks that a prompt begins with, which are the last used now."""
        keys = []
        for each in ids:
            if (above, each) not in self._chunks:
                break
            keys.append((above, each))
            above = self._chunks[above, each]
        for key in reversed(keys):
            self._chunks.move_to_end(key)
        return [self._chunks[key] for key in keys]

    def _put(self, origin: Origin, ids: list[bytes], chunks: list[_Chunk]) -> None:
        """Store the chunks that a prompt begins with."""
        above: Origin | _Chunk = origin
        with self._lock:
            for each, chunk in zip(ids, chunks, strict=False):
                if (above, each) not in self._chunks:
                    self._chunks[above, each] = chunk
                    self._nbytes += chunk.nbytes
                above = self._chunks[above, each]
            self._use(origin, ids)
            while self._nbytes > self.max_bytes:
                self._nbytes -= self._chunks.popitem(last=False)[1].nbytes


def _part_of(layer: Any, begin: int) -> Any:
    """Return what a layer has of its tokens from a position on."""
    if type(layer) is not ChunkedPrefillLayer or not layer.get_seq_length():
        return _packed(layer)
    rows = tuple(x[:, :, begin:].clone() for x in layer.rows())
    checkpoint = (layer.checkpoints or {}).get(layer.get_seq_length())
    return rows, checkpoint or (layer.state and layer.state.clone())


def _bytes_of(values: list[Any]) -> int:
    """Return the bytes of the tensors in lists, dicts and states, shared ones once."""
    storages: dict[int, int] = {}
    left = [*values]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (list, tuple)):
            left += value
        elif isinstance(value, (dict, PrefillState, Checkpoint)):
            left += (value if isinstance(value, dict) else vars(value)).values()
    return sum(storages.values())


def _packed(layer: Any) -> Any:
    """Return a copy of a whole layer, without room for more tokens."""
    made = branch_of(layer, room=0)
    if isinstance(layer, ChunkedPrefillLayer) and layer.get_seq_length():
        made.leave_buffers()
    elif type(layer) is DynamicSlidingWindowLayer and layer.is_initialized:
        for name in ("keys", "values"):  # Views of all rows of the last call.
            setattr(made, name, getattr(layer, name).clone())
    return made


def _fill(cache: ChunkedPrefillCache, chunks: list[_Chunk], step: int, new: int) -> None:
    """Give an empty cache the tokens of chunks, with room for `new` more."""
    layers: list[Any] = cache.layers
    for number, parts in enumerate(zip(*(chunk.layers for chunk in chunks), strict=True)):
        if not isinstance(parts[-1], tuple):
            layers[number] = branch_of(parts[-1], room=0)
            continue
        layer, state = layers[number], parts[-1][1]
        if isinstance(state, Checkpoint):
            state = state.state(len(chunks) * step)
        elif state is not None:
            state = state.clone()
        layer.begin_after([rows for rows, _ in parts], state, new)
        kept = ((end * step, x) for end, (_, x) in enumerate(parts, 1))
        layer.checkpoints = {end: x for end, x in kept if isinstance(x, Checkpoint)}
