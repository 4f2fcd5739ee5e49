"""What a forward remembers of a cache, to restore it if it fails."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.state import PrefillState


class CacheSnapshot:
    """The state of a cache before a forward: full layers by length, sliding layers by reference.

    Layers that change their tensors in place (static caches, linear attention) and layers of
    unknown classes cannot be restored. If a failed forward has changed one, the cache is marked:
    using it again would continue from half of a call.
    """

    def __init__(self, cache: Any) -> None:
        # The list itself, even if empty: a cache may get its layers only as it grows.
        self._layers: list[Any] = getattr(cache, "layers", [])
        self._count = len(self._layers)
        self._cache = cache
        self._full: list[tuple[Any, int]] = []
        self._sliding: list[tuple[Any, dict[str, Any]]] = []
        self._others: list[tuple[Any, Any]] = []
        self._states: list[tuple[ChunkedPrefillLayer, PrefillState | None]] = []
        for layer in self._layers:
            if type(layer) in (DynamicLayer, ChunkedPrefillLayer):
                self._full.append((layer, layer.get_seq_length()))
            elif type(layer) is DynamicSlidingWindowLayer:
                self._sliding.append((layer, vars(layer).copy()))
            else:
                self._others.append((layer, _versions(layer)))

    def keep_state(self, layer: ChunkedPrefillLayer) -> None:
        """Remember the scores and memory set of a layer, which are about to change in place."""
        self._states.append((layer, None if layer.state is None else layer.state.clone()))

    def restore(self) -> None:
        """Restore every remembered layer and remove the layers added since."""
        # Lengths, not references: the old keys of all layers would double the memory of the cache.
        for layer, length in self._full:
            if length == 0:
                layer.reset()
            elif layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())
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
        f"h2o_prefill: a forward has failed and left layers of the cache ({kind}) half "
        "updated; reset() the cache, or use a new one"
    )


def _versions(layer: Any) -> list[tuple[str, int, Any]]:
    """Return which tensors a cache layer has and how often each was changed in place.

    Tensors of inference mode do not count their changes: they compare as changed.
    """
    found = []
    for name, value in vars(layer).items():
        items = value.values() if isinstance(value, dict) else [value]
        tensors = (x for x in items if isinstance(x, Tensor))
        found += [(name, id(x), object() if x.is_inference() else x._version) for x in tensors]
    return found
