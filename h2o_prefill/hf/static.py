"""A static cache that sparse prefill works on in place, in eager mode and in compiled graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import LogitOptions
from h2o_prefill.hf.graph_call import GraphCall, graph
from h2o_prefill.hf.token_history import KeepsTokenIds, is_empty


class StaticPrefillLayer(StaticLayer):
    """Keys and values of one layer, and beside them the scores and memory set of its prefill."""

    padded = False  # Rows with padding are never prefilled sparsely here.
    # [B, Hkv, capacity], attention that each position received so far.
    scores: Tensor | None
    # int32 [B, Hkv, K + L + H or more], the set of the last sparse chunk, -1 where absent.
    memory: Tensor | None
    # Keys and values [B, Hkv, T, D] of a call between `update` and attention.
    added: tuple[Tensor, Tensor] | None
    # Whether `attend` was called in the forward that is under way.
    attended: bool

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len, **kwargs)
        self._begin_empty()

    @staticmethod
    def adopt(layer: StaticLayer) -> None:
        """Make an empty layer one of these, in place."""
        layer.__class__ = StaticPrefillLayer
        layer._begin_empty()  # type: ignore[attr-defined]

    def _begin_empty(self) -> None:
        self.scores = self.memory = self.added = None
        self.attended = False
        self.memory_size = 0

    def prepare(self, memory_size: int) -> None:
        """Make room for the memory sets of a forward."""
        self.added = None
        self.attended = False
        self.memory_size = max(self.memory_size, memory_size)
        if self.is_initialized and (self.scores is None or self.scores.device != self.device):
            self._allocate()
        elif self.memory is not None and self.memory.shape[2] < self.memory_size:
            # The settings have changed since: a larger set goes on from the smaller one.
            grown = self.memory_size - self.memory.shape[2]
            self.memory = torch.nn.functional.pad(self.memory, (0, grown), value=-1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate everything."""
        super().lazy_initialization(key_states, value_states)
        self._allocate()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values after the existing ones; return the buffers."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.added = key_states, value_states
        if torch.compiler.is_dynamo_compiling():
            graph.layer = self
        return keys, values

    def take(self) -> tuple[Tensor, Tensor]:
        """Return what `update` was given; attention takes it."""
        assert self.added is not None
        added, self.added = self.added, None
        return added

    def attend(
        self,
        query: Tensor,
        call: GraphCall,
        number: int,
        options: LogitOptions,
    ) -> Tensor:
        """Attend with the first tokens of those that `update` has just written."""
        assert call.position is not None and self.scores is not None and self.memory is not None
        assert self.keys is not None and self.values is not None
        rows, kind = query.shape[2], self.keys.dtype
        key, value = self.take()
        self.attended = True
        return ops.prefill_attention_(
            query.to(kind),
            key[:, :, :rows].to(kind),
            value[:, :, :rows].to(kind),
            self.keys,
            self.values,
            self.scores,
            self.memory,
            call.position,
            *call.recall,
            number,
            call.settings,
            *options,
        )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.added = None
        if self.scores is not None and self.memory is not None:
            self.scores.zero_()
            self.memory.fill_(-1)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows of the batch."""
        super().reorder_cache(beam_idx)
        if self.scores is not None and self.memory is not None:
            rows = beam_idx.to(self.scores.device)
            self.scores = self.scores.index_select(0, rows)
            self.memory = self.memory.index_select(0, rows)

    def _allocate(self) -> None:
        assert self.keys is not None
        shape = self.keys.shape[:3]
        kind = torch.float64 if self.keys.dtype == torch.float64 else torch.float32
        self.scores = self.keys.new_zeros(shape, dtype=kind)
        self.memory = self.keys.new_full((*shape[:2], self.memory_size), -1, dtype=torch.int32)
        if not torch.compiler.is_dynamo_compiling():
            for buffer in (self.scores, self.memory):
                torch._dynamo.mark_static_address(buffer)


class StaticPrefillCache(KeepsTokenIds, StaticCache):
    """A `StaticCache` whose full-attention layers remember where sparse prefill stands.

    What `StaticCache` is to `DynamicCache`, this is to `ChunkedPrefillCache`: buffers of one size,
    changed in place, for `torch.compile` and `generate(cache_implementation="static")`. An enabled
    model makes one of every empty `StaticCache` that it is given.
    """

    def __init__(self, config: Any, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(config, max_cache_len, **kwargs)
        self._replace_layers()

    @staticmethod
    def adopt(cache: Cache) -> None:
        """Make an empty `StaticCache` one of these, in place; leave every other cache alone."""
        if type(cache) is StaticCache and not cache.offloading and is_empty(cache):
            cache.__class__ = StaticPrefillCache
            cache._replace_layers()  # type: ignore[attr-defined]

    def _replace_layers(self) -> None:
        for layer in self.layers:
            if type(layer) is StaticLayer:
                StaticPrefillLayer.adopt(layer)
        self._token_ids = []
        self._position = torch.zeros(2, dtype=torch.int64)

    def begin(self, config: PrefillConfig) -> None:
        """Make room for the memory sets of a forward."""
        layers = (None, *config.wide_layers)
        memory_size = max(config.of_layer(layer).memory_size for layer in layers)
        for layer in self.layers:
            if isinstance(layer, StaticPrefillLayer):
                layer.prepare(memory_size)

    def position_for(self, new: int) -> Tensor:
        """Return the position of a call of so many tokens, int64 [2] on the CPU."""
        # A decoding call has no use for it, and asking a device for its length would wait for it.
        if new > 1:
            self._position[0] = int(self.get_seq_length())
            if self._position[0] == 0:
                self._position[1] = 0
        return self._position
