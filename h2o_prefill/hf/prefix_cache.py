"""Prompts that were prefilled, for prompts that begin as they do."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2o_prefill.fingerprint import fingerprint
from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.forward import announce
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer, RecurrentLayer
from h2o_prefill.hf.prefill import call_tokens, chunked_prefill, read_prompt
from h2o_prefill.state import LayerState

# Layers whose rows of a chunk can be told from others, or that are small: those that keep all keys
# beside a recurrence are neither.
_STORED = (ChunkedPrefillLayer, DynamicSlidingWindowLayer, RecurrentLayer)


@dataclass(eq=False)
class _Chunk:
    """What a call of one chunk, after others, left in the layers of a cache."""

    # For each layer its keys and values [1, Hkv, S, D], the tokens that have scores, and what the
    # next chunk needs of them (`LayerState.checkpoint`); or all of the layer, of another kind.
    layers: list[tuple[Any, ...] | dict[str, Any]]
    nbytes: int


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
        Most bytes of keys, values, states and token ids, at least 0; above it, the least recently
        used chunks are removed.
    """

    def __init__(self, max_bytes: int) -> None:
        if not max_bytes >= 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        # By what is before them (what they were prefilled with, or a chunk) and their ids; the
        # least recently used first, and each before the one that it follows.
        self._chunks: OrderedDict[tuple[Any, bytes], _Chunk] = OrderedDict()
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
        input_ids = input_ids.long()
        cache = ChunkedPrefillCache(config=model.config)
        enabled = enabled_of(model.config)
        if enabled is None:
            return cache, 0
        length, step = input_ids.shape[1], call_tokens(1, enabled.config)
        config = enabled.resolve(model, length)
        settings = config.to_string()
        provenance = _provenance(model, settings, enabled.tokenizer)
        # What follows a dense tail depends on where its call ended.
        end = 0 if config.dense_tail else (length - 1) // step * step
        ids = [x.tobytes() for x in input_ids[0, :end].cpu().numpy().reshape(-1, step)]
        with self._lock:
            chunks = self._use(provenance, ids)
        past = len(chunks) * step
        if chunks:
            cache.settings, cache.tokenizer = settings, enabled.tokenizer
            cache.min_prefill = config.sparse_from if enabled.config.is_auto else None
            cache._token_ids = [input_ids[:, :past]]
            _fill(cache, chunks)

        def keep(done: int, _: int) -> None:
            layers: list[Any] = cache.layers
            if cache.token_ids is not None and all(type(layer) in _STORED for layer in layers):
                begin = past + done - step
                parts = [_part_of(x, begin, number, settings) for number, x in enumerate(layers)]
                tensors = (x for x in tree_leaves(parts) if isinstance(x, Tensor))
                chunks.append(_Chunk(parts, len(ids[0]) + sum(x.nbytes for x in tensors)))

        if past < end:
            with announce(enabled, length):
                new = input_ids[:, past:end]
                chunked_prefill(model, new, chunks_per_call=1, cache=cache, on_progress=keep)
            if provenance == _provenance(model, settings, enabled.tokenizer):
                self._put(provenance, ids, chunks)
        return cache, past

    def clear(self) -> None:
        """Remove all chunks."""
        with self._lock:
            self._chunks.clear()
            self._nbytes = 0

    def _use(self, above: Any, ids: list[bytes]) -> list[_Chunk]:
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

    def _put(self, provenance: Any, ids: list[bytes], chunks: list[_Chunk]) -> None:
        """Store the chunks that a prompt begins with."""
        above = provenance
        with self._lock:
            for each, chunk in zip(ids, chunks, strict=False):
                if (above, each) not in self._chunks:
                    self._chunks[above, each] = chunk
                    self._nbytes += chunk.nbytes
                above = self._chunks[above, each]
            self._use(provenance, ids)
            while self._nbytes > self.max_bytes:
                self._nbytes -= self._chunks.popitem(last=False)[1].nbytes


def _provenance(model: Any, settings: str, tokenizer: str) -> Any:
    """Return all that makes the keys and values of a text."""
    kind = model.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    return weakref.ref(model), fingerprint(model, tokenizer), settings, cast, model.device


def _part_of(
    layer: Any, begin: int, number: int, settings: str
) -> tuple[Any, ...] | dict[str, Any]:
    """Return what a layer has of its tokens from a position on."""
    if type(layer) is not ChunkedPrefillLayer:
        attributes: dict[str, Any] = tree_map_only(Tensor, torch.clone, vars(layer))
        return attributes
    if not layer.get_seq_length():  # It shares the keys of another one.
        return {}
    state = layer.synchronized()
    rows = (x[:, :, begin:].clone() for x in (state.key, state.value))
    return *rows, state.scored, state.checkpoint(number, settings) if state.scored else None


def _fill(cache: ChunkedPrefillCache, chunks: list[_Chunk]) -> None:
    """Give an empty cache the tokens of chunks."""
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        parts: list[Any] = [chunk.layers[number] for chunk in chunks]
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
