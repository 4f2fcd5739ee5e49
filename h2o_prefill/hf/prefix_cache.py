"""Prompts that were prefilled, for prompts that begin as they do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2o_prefill.hf.cache import ChunkedPrefillCache, branch_of
from h2o_prefill.hf.forward import announce
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.prefill import call_tokens, chunked_prefill
from h2o_prefill.identity import Origin, changed_text
from h2o_prefill.state import Checkpoint, PrefillState

# Tokens that a found cache has room for, beyond its own and the rest of the prompt.
_ROOM = 256


@dataclass(eq=False)
class _Piece:
    """Consecutive tokens of prompts, which follow the pieces above it in a tree."""

    ids: Tensor  # int64 [n]
    end: int  # tokens of the prompt up to the last of them
    parent: _Piece | None
    is_chunk: bool  # a whole chunk, whose end any prompt may go on from; else the end of a text
    # For each layer its keys and values [1, Hkv, n, D], and what `crop` or the cache has at `end`;
    # or the whole layer, where it is of another kind.
    layers: list[Any] = field(default_factory=list)
    below: list[_Piece] = field(default_factory=list)
    nbytes: int = 0  # of ids and layers
    used: int = 0

    def path(self) -> list[_Piece]:
        """Return the pieces down to this one."""
        above = [] if self.parent is None else self.parent.path()
        return [*above, self] if self.end else []

    def matching(self, ids: Tensor) -> Iterator[_Piece]:
        """Yield the pieces below this one that a prompt, int64 [T], goes on with."""
        for piece in self.below:
            if ids[self.end : piece.end].equal(piece.ids):
                yield piece
                yield from piece.matching(ids)

    def all(self) -> Iterator[_Piece]:
        """Yield all pieces below this one."""
        for piece in self.below:
            yield piece
            yield from piece.all()


class PrefixCache:
    """Prefilled prompts; a prompt that begins as one of them prefills only the rest.

    The longest common beginning is reused in whole chunks, so that results, to the bit, do not
    depend on what the cache holds. A prompt that goes on after the last token of a stored text, as
    the next turn of a chat does, reuses all of that text. Prompts share the keys and values of
    common chunks. May be used by several threads.

    Parameters
    ----------
    max_bytes : int
        Most bytes of keys, values, states and token ids; above it, the least recently used texts
        are removed.

    Raises
    ------
    ValueError
        If `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self._roots: list[tuple[Origin, _Piece]] = []
        self._nbytes = self._clock = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values, states and token ids occupy, shared ones once."""
        return self._nbytes

    def prefill(self, model: Any, input_ids: Tensor) -> tuple[ChunkedPrefillCache, int]:
        """Prefill all chunks of a prompt but the last, and store them.

        Chunks go through the model one by one, as products of linear layers depend in their last
        bits on the number of tokens of a call. The rest is left to the caller: `generate` takes the
        whole prompt and the cache. A rest shorter than `min_prefill` attends densely. With
        `dense_tail` all of the prompt is left, and whole texts alone are reused.

        Parameters
        ----------
        model : PreTrainedModel
            The model. One that is not enabled prefills nothing.
        input_ids : Tensor
            int64 [1, T], the whole prompt.

        Returns
        -------
        ChunkedPrefillCache
            A cache with the beginning of the prompt, at most T - 1 tokens, for `add` to store.
        int
            How many of its tokens were stored already: prefilled with this model, its weights,
            active adapters, settings, selection rule and tokenizer.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be [1, T] with T >= 1, got {list(input_ids.shape)}")
        cache = ChunkedPrefillCache(config=model.config, checkpoints=True)
        enabled = enabled_of(model.config)
        if enabled is None:
            return cache, 0
        length, step = input_ids.shape[1], call_tokens(1, enabled.config)
        config = enabled.resolve(model, length)
        now = Origin(weakref.ref(model), config, enabled.marks(model))
        with self._lock:
            found = self._root(now)
            held = found.matching(input_ids[0].cpu().long())
            ends = [x for x in held if x.end < length and not (x.is_chunk and x.end % step)]
            last = max(ends, key=lambda piece: piece.end, default=found)
            self._use(last)
        if last.end:
            cache._origin = now
            cache.min_prefill = config.sparse_from if enabled.config.is_auto else None
            cache._token_ids = [input_ids[:, : last.end].long()]
            _fill(cache, last.path(), length - last.end + _ROOM)
        # What follows a dense tail depends on where its call ended.
        end = 0 if enabled.config.dense_tail else (length - 1) // step * step
        if last.is_chunk and last.end < end:
            new = input_ids[:, last.end : end]
            with announce(length):
                chunked_prefill(model, new, chunks_per_call=1, cache=cache)
            self.add(cache)
        return cache, last.end

    def add(self, cache: ChunkedPrefillCache) -> None:
        """Store the text that a cache holds now; the cache may go on.

        Its chunks serve any prompt that begins with them if the cache keeps checkpoints, as one of
        `prefill` does; else the text is reused as a whole.

        Raises ValueError unless it holds one row of known token ids and was used by an enabled
        model, in all calls with the same settings, weights, adapters, rule and tokenizer.
        """
        known, origin = cache.token_ids, cache._origin
        if known is None or known.shape[0] != 1 or origin is None:
            raise ValueError(
                "cache must hold one row of known token ids, and have been used by an enabled model"
            )
        if origin.changed:
            raise ValueError(changed_text(origin.changed))
        ids = known[0].cpu()
        chunk = origin.settings.chunk_size
        dense = origin.settings.exact or cache.min_prefill not in (None, chunk)
        with self._lock:
            last = self._root(origin)
            end = last.end + chunk
            while end <= ids.shape[0] and _is_checkpointed(cache, end, dense):
                last = self._down(last, cache, ids, end, is_chunk=True)
                end += chunk
            while last.end < ids.shape[0]:
                texts = [x for x in last.below if not x.is_chunk]
                held = [x for x in texts if ids[last.end : x.end].equal(x.ids)]
                same = next((x for x in held if _has_rows_of(x, cache)), None)
                if same is None and (other := [x for x in held if x.end == ids.shape[0]]):
                    self._remove(other[0])  # the same tokens by other calls
                last = same or self._down(last, cache, ids, ids.shape[0], is_chunk=False)
            self._use(last)
            self._shrink()

    def clear(self) -> None:
        """Remove all texts."""
        with self._lock:
            self._roots.clear()
            self._nbytes = 0

    def _root(self, origin: Origin) -> _Piece:
        for known, root in self._roots:
            if known == origin:
                return root
        root = _Piece(torch.empty(0, dtype=torch.int64), 0, None, is_chunk=True)
        self._roots.append((origin, root))
        return root

    def _down(
        self, last: _Piece, cache: ChunkedPrefillCache, ids: Tensor, end: int, is_chunk: bool
    ) -> _Piece:
        """Return the piece below one that ends at `end`, a new one if there is none."""
        new = ids[last.end : end].clone()
        for piece in last.below if is_chunk else ():
            if piece.is_chunk and piece.ids.equal(new):
                return piece
        made = _Piece(new, end, last, is_chunk)
        made.layers = [_part_of(layer, last.end, end, is_chunk) for layer in cache.layers]
        whole = (vars(part) for part in made.layers if not isinstance(part, tuple))
        made.nbytes = _bytes_of([made.ids, made.layers, *whole])
        last.below.append(made)
        self._nbytes += made.nbytes
        return made

    def _use(self, last: _Piece) -> None:
        self._clock += 1
        for piece in last.path():
            piece.used = self._clock

    def _remove(self, piece: _Piece) -> None:
        assert piece.parent is not None
        piece.parent.below.remove(piece)
        self._nbytes -= piece.nbytes + sum(x.nbytes for x in piece.all())

    def _shrink(self) -> None:
        while self._nbytes > self.max_bytes:
            leaves = (x for _, root in self._roots for x in root.all() if not x.below)
            self._remove(min(leaves, key=lambda piece: piece.used))


def _is_checkpointed(cache: ChunkedPrefillCache, end: int, dense: bool) -> bool:
    """Return whether the prompt so far came by sparse calls, or is all dense."""
    layers: list[Any] = cache.layers
    if not all(type(layer) is ChunkedPrefillLayer for layer in layers):
        return False
    sparse = [layer for layer in layers if layer.state is not None]
    return (dense or bool(sparse)) and all(end in (layer.checkpoints or ()) for layer in sparse)


def _part_of(layer: Any, begin: int, end: int, is_chunk: bool) -> Any:
    if type(layer) is not ChunkedPrefillLayer or not layer.get_seq_length():
        return _packed(layer)
    rows = tuple(x[:, :, begin:end].clone() for x in layer.rows())
    if layer.state is None:
        return rows, None
    return rows, layer.checkpoints[end] if is_chunk and layer.checkpoints else layer.state.clone()


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


def _has_rows_of(piece: _Piece, cache: ChunkedPrefillCache) -> bool:
    """Return whether a piece has the keys and values of a cache, to the bit."""
    layers: list[Any] = cache.layers
    begin = piece.end - piece.ids.shape[0]
    for layer, part in zip(layers, piece.layers, strict=True):
        if not isinstance(part, tuple):
            return False
        held = (x[:, :, begin : piece.end] for x in layer.rows())
        if not all(map(torch.equal, part[0], held)):
            return False
    return True


def _fill(cache: ChunkedPrefillCache, path: list[_Piece], new: int) -> None:
    """Give an empty cache the tokens of pieces, with room for `new` more."""
    last, layers = path[-1], list[Any](cache.layers)
    for number, part in enumerate(last.layers):
        if not isinstance(part, tuple):
            cache.layers[number] = branch_of(part, room=0)
            continue
        layer, state = layers[number], part[1]
        if isinstance(state, Checkpoint):
            state = state.state(last.end)
        elif state is not None:
            state = state.clone()
        layer.begin_after([piece.layers[number][0] for piece in path], state, new)
        kept = ((piece.end, piece.layers[number][1]) for piece in path)
        layer.checkpoints = {end: x for end, x in kept if isinstance(x, Checkpoint)}
