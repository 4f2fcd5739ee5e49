"""Prompts that were prefilled, for prompts that begin as they do."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from h2o_prefill.fingerprint import fingerprint
from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.forward import announce
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.prefill import call_tokens, chunked_prefill, read_prompt
from h2o_prefill.state import LayerState

# Layers whose rows of a chunk can be told from others, or that are small: those that keep all keys
# beside a recurrence are neither.
_STORED = (ChunkedPrefillLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)

# What a call of one chunk, after others, left in the layers of a cache. For each layer its keys and
# values [1, Hkv, S, D], the tokens that have scores, and what the next chunk needs of them
# (`LayerState.checkpoint`); or all of the layer, of another kind.
_Chunk = list[tuple[Any, ...] | dict[str, Any]]


class PrefixCache:
    """Prefilled prompts; a prompt that begins as one of them prefills only the rest.

    The longest common beginning is reused in whole chunks, each of which came by a call of its own,
    so that results, to the bit, do not depend on what the cache holds. Prompts share the keys and
    values of common chunks. Changed weights are noticed, but for writes through `.data`: `clear`
    then. Of models with attention and a recurrence in one layer, as Falcon H1, nothing is stored.
    May be used by several threads.

    Parameters
    ----------
    max_bytes : int
        Most bytes of keys, values and states, at least 0; above it, the least recently used chunks
        are removed.

    Attributes
    ----------
    nbytes : int
        Bytes that keys, values and states occupy, shared ones once.
    """

    def __init__(self, max_bytes: int) -> None:
        if not max_bytes >= 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes, self.nbytes = max_bytes, 0
        # By what they were prefilled with, and a hash of the ids up to their end; the least
        # recently used first, and each before the one that it follows.
        self._chunks: OrderedDict[Any, _Chunk] = OrderedDict()
        self._lock = threading.RLock()

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
            int64 [1, T], without padding, also as lists, or what a tokenizer returned; ValueError
            for others.

        Returns
        -------
        ChunkedPrefillCache
            A cache with the beginning of the prompt, at most T - 1 tokens.
        int
            How many of its tokens were stored already: prefilled with this model, its weights,
            active adapters, settings, tokenizer and autocast dtype.
        """
        _, input_ids = read_prompt(input_ids, None, None, 0, model)
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must be [1, T], got {list(input_ids.shape)}")
        cache, enabled = ChunkedPrefillCache(config=model.config), enabled_of(model.config)
        if enabled is None:
            return cache, 0
        length, step = input_ids.shape[1], call_tokens(1, enabled.config)
        config = enabled.resolve(model, length)
        settings = config.to_string()
        provenance = _provenance(model, settings, enabled.tokenizer)
        # What follows a dense tail depends on where its call ended.
        end = 0 if config.dense_tail else (length - 1) // step * step
        keys = [(provenance, x) for x in _hashes(input_ids[0, :end], step)]
        chunks = self._use(keys)
        past = len(chunks) * step
        if chunks:
            cache.settings, cache.tokenizer = settings, enabled.tokenizer
            cache.min_prefill = config.sparse_from if enabled.config.is_auto else None
            cache.token_ids = input_ids[:, :past]
            _fill(cache, chunks)

        def keep(done: int, _: int) -> None:
            layers: list[Any] = cache.layers
            if all(type(layer) in _STORED for layer in layers):
                begin = past + done - step
                chunks.append([_part_of(x, begin, i, settings) for i, x in enumerate(layers)])

        if past < end:
            with announce(enabled, length):
                new = input_ids[:, past:end]
                chunked_prefill(model, new, chunks_per_call=1, cache=cache, on_progress=keep)
            if provenance == _provenance(model, settings, enabled.tokenizer):
                self._put(keys, chunks)
        return cache, past

    def clear(self) -> None:
        """Remove all chunks."""
        with self._lock:
            self._chunks.clear()
            self.nbytes = 0

    def _use(self, keys: list[Any]) -> list[_Chunk]:
        """Return the stored chunks that a prompt begins with, which are the last used now."""
        with self._lock:
            stored = list(takewhile(self._chunks.__contains__, keys))
            for key in reversed(stored):
                self._chunks.move_to_end(key)
            return [self._chunks[key] for key in stored]

    def _put(self, keys: list[Any], chunks: list[_Chunk]) -> None:
        """Store the chunks that a prompt begins with."""
        with self._lock:
            for key, chunk in zip(keys, chunks, strict=False):
                if key not in self._chunks:
                    self._chunks[key] = chunk
                    self.nbytes += _bytes_of(chunk)
            self._use(keys)
            while self.nbytes > self.max_bytes:
                self.nbytes -= _bytes_of(self._chunks.popitem(last=False)[1])


def _bytes_of(chunk: _Chunk) -> int:
    return sum(x.nbytes for x in tree_leaves(chunk) if isinstance(x, Tensor))


def _hashes(ids: Tensor, step: int) -> list[bytes]:
    """Return a hash of the ids up to the end of each chunk."""
    chunks = (x.tobytes() for x in ids.cpu().numpy().reshape(-1, step))
    hashed = accumulate(chunks, lambda x, y: hashlib.sha256(x + y).digest(), initial=b"")
    return list(hashed)[1:]


def _provenance(model: Any, settings: str, tokenizer: str) -> Any:
    """Return all that makes the keys and values of a text."""
    kind = model.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    return weakref.ref(model), fingerprint(model, tokenizer), settings, cast, model.device


def _part_of(layer: Any, begin: int, number: int, settings: str) -> Any:
    """Return what a layer has of its tokens from a position on."""
    if type(layer) is not ChunkedPrefillLayer:
        return tree_map_only(Tensor, torch.clone, vars(layer))
    if not layer.get_seq_length():  # It shares the keys of another one.
        return {}
    state = layer.synchronized()
    rows = (x[:, :, begin:].clone() for x in (state.key, state.value))
    return *rows, state.scored, state.checkpoint(number, settings) if state.scored else None


def _fill(cache: ChunkedPrefillCache, chunks: list[_Chunk]) -> None:
    """Give an empty cache the tokens of chunks."""
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        parts: list[Any] = [chunk[number] for chunk in chunks]
        if isinstance(parts[-1], dict):
            vars(layer).update(tree_map_only(Tensor, torch.clone, parts[-1]))
            continue
        keys, values, scored, checkpoint = zip(*parts, strict=True)
        state = LayerState()
        state.append(torch.cat(keys, dim=2), torch.cat(values, dim=2))
        if checkpoint[-1] is not None:
            last = LayerState.at_checkpoint(scored[-1], *checkpoint[-1])
            state.set_scores(last.scores, last.memory, last.last_chunk_begin, last.errors)
        layer.set_state(state)
