"""Texts that were prefilled, for prompts that begin with them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor

from h2o_prefill.hf.cache import ChunkedPrefillCache, packed_copy
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.identity import CHANGED, Origin
from h2o_prefill.session_file import settings_fields
from h2o_prefill.state import PrefillState


class PrefixCache:
    """Caches of texts; a prompt that begins with a stored text prefills only its other tokens.

    A text is reused as a whole, for the scores of a part of it would have what later queries added.
    The prompt then has the result of two calls on one cache, the text and the rest: a rest of less
    than a chunk is dense, where it would be sparse as the end of one long call. Texts that continue
    each other, such as the turns of a chat, share keys and values. May be used by several threads.

    Parameters
    ----------
    max_bytes : int
        Most bytes of keys, values, states and token ids of all texts; above it, those that were
        used least recently are removed.

    Raises
    ------
    ValueError
        If `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        # Token ids [1, n] and the cache of them, the most recently used one last.
        self._held: list[tuple[Tensor, ChunkedPrefillCache]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values, states and token ids of all texts occupy, shared ones once."""
        with self._lock:
            return _bytes_of(self._held)

    def find(self, model: Any, input_ids: Tensor) -> ChunkedPrefillCache:
        """Return a cache for a prompt, which may hold the beginning of it.

        Parameters
        ----------
        model : PreTrainedModel
            The model, enabled as it will be for the prompt.
        input_ids : Tensor
            int64 [1, T], the whole prompt; `generate` gets all of it, other calls the tokens from
            `cache.get_seq_length()` on.

        Returns
        -------
        ChunkedPrefillCache
            A copy of the longest stored text that the prompt begins with and goes on after, of this
            model, its weights, active adapters, settings, selection rule and tokenizer; without
            one, an empty cache.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be [1, T] with T >= 1, got {list(input_ids.shape)}")
        enabled = enabled_of(model.config)
        if enabled is None:
            return ChunkedPrefillCache(config=model.config)
        settings = settings_fields(enabled.config)
        now = Origin(weakref.ref(model), settings, enabled.marks(model))
        with self._lock:
            fitting = [
                number
                for number, (text, cache) in enumerate(self._held)
                if cache._origin == now and _begins(input_ids, text)
            ]
            if not fitting:
                return ChunkedPrefillCache(config=model.config)
            longest = max(fitting, key=lambda number: self._held[number][0].shape[1])
            self._held.append(self._held.pop(longest))
            return self._held[-1][1].copy(room=0)

    def add(self, cache: ChunkedPrefillCache) -> None:
        """Store the text that a cache holds now; the cache may go on.

        Raises ValueError unless it holds one row of known token ids and was used by an enabled
        model, in all calls with the same settings, weights, adapters, rule and tokenizer.
        """
        ids, origin = cache.token_ids, cache._origin
        if ids is None or ids.shape[0] != 1 or origin is None:
            raise ValueError(
                "cache must hold one row of known token ids, and have been used by an enabled model"
            )
        if origin.changed:
            raise ValueError(
                f"cache must be of one state of its model, whose {CHANGED[origin.changed]} changed "
                "since it was filled"
            )
        with self._lock:
            self._held = [
                (text, held)
                for text, held in self._held
                if not (held._origin == origin and text.equal(ids))
            ]
            begun = [x for x in self._held if x[1]._origin == origin and _begins(ids, x[0])]
            begun.sort(key=lambda x: x[0].shape[1], reverse=True)
            self._held.append((ids, packed_copy(cache, [held for _, held in begun])))
            while self._held and _bytes_of(self._held) > self.max_bytes:
                del self._held[0]

    def clear(self) -> None:
        """Remove all texts."""
        with self._lock:
            self._held.clear()


def _begins(ids: Tensor, text: Tensor) -> bool:
    """Return whether ids [1, T] begin with a stored text, and go on after it."""
    length = text.shape[1]
    return length < ids.shape[1] and bool(ids[:, :length].to(text).equal(text))


def _bytes_of(held: list[tuple[Tensor, ChunkedPrefillCache]]) -> int:
    """Return the bytes of the storages of all tensors that texts and the layers of caches have."""
    storages: dict[int, int] = {}
    left: list[Any] = [(text, cache._token_ids, *map(vars, cache.layers)) for text, cache in held]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (list, tuple)):
            left += value
        elif isinstance(value, (dict, PrefillState)):
            left += (value if isinstance(value, dict) else vars(value)).values()
    return sum(storages.values())
