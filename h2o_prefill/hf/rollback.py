"""Put a Hugging Face cache back to what it was before a forward that failed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.state import PrefillState


class CacheSnapshot:
    """The state of a cache: full layers by their length, sliding layers by reference.

    Layers that change their tensors in place (static caches, linear attention) and layers of
    unknown classes cannot be put back. If a failed forward has changed one, the cache is marked:
    using it again would go on from half of a call.
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
        self._cache = cache
        kept = {id(layer) for layer, _ in (*self._full, *self._sliding)}
        self._others = [
            (layer, _versions(layer)) for layer in self._layers if id(layer) not in kept
        ]

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
        changed = [layer for layer, versions in self._others if _versions(layer) != versions]
        if changed:
            self._cache._h2o_prefill_broken = type(changed[0]).__name__
        del self._layers[self._count :]


def check_usable(cache: Any) -> None:
    """Refuse a cache that a failed forward has left half updated, until it is reset."""
    kind = getattr(cache, "_h2o_prefill_broken", None)
    if kind is None:
        return
    if cache.get_seq_length() == 0:
        del cache._h2o_prefill_broken
        return
    raise RuntimeError(
        f"h2o_prefill: a forward has failed and left layers of past_key_values ({kind}) half "
        "updated; reset() the cache, or use a new one"
    )


def _versions(layer: Any) -> list[tuple[str, int, int]]:
    """Return which tensors a cache layer has and how often each was changed in place."""
    found = []
    for name, value in vars(layer).items():
        items = value.values() if isinstance(value, dict) else [value]
        found += [(name, id(x), x._version) for x in items if isinstance(x, Tensor)]
    return found
