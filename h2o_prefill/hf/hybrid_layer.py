"""A cache layer of attention that sparse prefill works on, and of a recurrence beside it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from h2o_prefill.hf.layer import ChunkedPrefillLayer

# Older versions of transformers have other caches for hybrid models: those keep no state.
HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
RecurrentLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)


def prefill_layer_for(layer: Any) -> Any:
    """Return a layer that keeps the state of sparse prefill in the place of one that is empty."""
    if type(layer) is DynamicLayer:
        return ChunkedPrefillLayer()
    if type(layer) is HybridLayer:
        return ChunkedPrefillHybridLayer(layer.number_of_states)
    return layer


if HybridLayer is not None:

    class ChunkedPrefillHybridLayer(HybridLayer, ChunkedPrefillLayer):
        """A `ChunkedPrefillLayer` with the states of a convolution and a recurrence.

        Its base calls the methods of `DynamicLayer` by name, past those of `ChunkedPrefillLayer`.
        """

        def __init__(self, number_of_states: int = 1) -> None:
            ChunkedPrefillLayer.__init__(self)
            HybridLayer.__init__(self, number_of_states)

        def reset(self) -> None:
            """Forget everything."""
            RecurrentLayer.reset(self)
            ChunkedPrefillLayer.reset(self)

        def crop(self, tokens_to_remove: int) -> None:
            """Remove the last tokens, where the recurrence can."""
            RecurrentLayer.crop(self, tokens_to_remove)
            ChunkedPrefillLayer.crop(self, tokens_to_remove)

        def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
            """Reorder the rows of the batch."""
            RecurrentLayer.reorder_cache(self, beam_idx)
            ChunkedPrefillLayer.reorder_cache(self, beam_idx)

        def offload(self) -> None:
            """Move the layer to the CPU."""
            RecurrentLayer.offload(self)
            ChunkedPrefillLayer.offload(self)

        def prefetch(self) -> None:
            """Move an offloaded layer back to its device."""
            RecurrentLayer.prefetch(self)
            ChunkedPrefillLayer.prefetch(self)
