"""A Hugging Face cache that lets several calls of one prompt go on sparsely."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from h2o_prefill.hf.hybrid_layer import prefill_layer_for
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.token_history import KeepsTokenIds, is_empty


class ChunkedPrefillCache(KeepsTokenIds, DynamicCache):
    """A `DynamicCache` whose full-attention layers remember where sparse prefill stands.

    With it, calls of one prompt in multiples of the chunk size give what one call gives, so
    `generate(prefill_chunk_size=...)`, a shared prefix (`copy.deepcopy`) and chat turns stay
    sparse. It holds the token ids as well, which lexical recall searches. Of a padded batch it
    keeps keys and values only: long calls that go on from one are dense.

    An enabled model uses it by itself: where the caller passes no cache, and in place of an empty
    `DynamicCache`.

    Parameters
    ----------
    config : PretrainedConfig, optional
        The model's; without it every layer counts as full attention.
    **kwargs
        Passed on to `DynamicCache`, as `offloading=True`.
    """

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._replace_layers()

    @staticmethod
    def adopt(cache: Cache) -> None:
        """Make an empty `DynamicCache` one of these, in place; leave every other cache alone.

        Its owner goes on with the same object.
        """
        if type(cache) is DynamicCache and is_empty(cache):
            cache.__class__ = ChunkedPrefillCache
            cache._replace_layers()  # type: ignore[attr-defined]

    def _replace_layers(self) -> None:
        self.layers = [prefill_layer_for(layer) for layer in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = ChunkedPrefillLayer
        self._token_ids = []
