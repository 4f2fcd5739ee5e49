"""Put a Hugging Face cache back to what it was before a forward that failed."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.state import PrefillState


class CacheSnapshot:
    """The state of a cache: full layers by their length, sliding layers by reference.

    Layers that change their tensors in place (static caches) and layers of unknown classes are left
    out.

    Parameters
    ----------
    cache : Cache
        The cache to remember.
    """

    def __init__(self, cache: Any) -> None:
        # The list itself, even if empty: a cache may get its layers only as it grows.
        self._layers: list[Any] = getattr(cache, "layers", [])
        self._count = len(self._layers)
        self._full = [
            (layer, layer.get_seq_length())
            for layer in self._layers
            if type(layer) in (DynamicLayer, ChunkedPrefillLayer)
        ]
        self._sliding = [
            (layer, vars(layer).copy())
            for layer in self._layers
            if type(layer) is DynamicSlidingWindowLayer
        ]
        self._states: list[tuple[ChunkedPrefillLayer, PrefillState | None]] = []

    def keep_state(self, layer: ChunkedPrefillLayer) -> None:
        """Remember the scores and memory set of a layer, which are about to change in place."""
        self._states.append((layer, None if layer.state is None else layer.state.clone()))

    def restore(self) -> None:
        """Put every remembered layer back and drop the layers that came since."""
        # Lengths, not references: the old keys of all layers would double the memory of the cache.
        for layer, length in self._full:
            if length == 0:
                layer.reset()
            elif isinstance(layer, ChunkedPrefillLayer):
                layer.truncate(length)
            elif layer.keys.shape[-2] > length:
                layer.keys = layer.keys[..., :length, :]
                layer.values = layer.values[..., :length, :]
        for layer, state in reversed(self._states):
            # A cache that its user has cut since an interrupt stays cut.
            if state is None or state.length <= layer.get_seq_length():
                layer.state = state
        for layer, attributes in self._sliding:
            if layer.get_seq_length() >= attributes["cumulative_length"]:
                vars(layer).update(attributes)
        del self._layers[self._count :]
