"""The token ids of a cache, which lexical recall searches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class KeepsTokenIds(Cache):
    """What a cache of this library has beside its layers: the ids of the tokens in them.

    Every operation that changes the tokens of the cache changes the ids too.
    """

    _token_ids: list[Tensor] | None

    @property
    def token_ids(self) -> Tensor | None:
        """The ids of the cached tokens, int64 [B, T]; None if there are none, or some unknown."""
        return self.token_ids_with(None)

    def token_ids_with(self, new: Tensor | None) -> Tensor | None:
        """Return the ids of the cached tokens and of `new` [B, Tq]; None if some are unknown."""
        if self._token_ids is None:
            return None
        pieces = self._token_ids if new is None else [*self._token_ids, new]
        return torch.cat(pieces, dim=1) if pieces else None

    def append_token_ids(self, new: Tensor | None) -> None:
        """Keep the ids of the tokens that a forward has just added."""
        ids = self.token_ids_with(new)
        known = new is not None and ids is not None and ids.shape[1] == self._length()
        self._token_ids = [ids] if known and ids is not None else None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._token_ids = []

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, from keys, values, states and ids."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        if length == 0:
            self._token_ids = []
        self._map_ids(lambda ids: ids[:, :length])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows of the batch."""
        super().reorder_cache(beam_idx)
        self._map_ids(lambda ids: ids.index_select(0, beam_idx.to(ids.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        super().batch_repeat_interleave(repeats)
        self._map_ids(lambda ids: ids.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch."""
        super().batch_select_indices(indices)
        self._map_ids(lambda ids: ids[indices.to(ids.device), ...])

    def _length(self) -> int | None:
        """Return the number of cached tokens, None if no layer counts them: all are recurrent."""
        try:
            return int(self.get_seq_length())
        except ValueError:
            return None

    def _map_ids(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._token_ids is not None:
            self._token_ids = [change(piece) for piece in self._token_ids]


def is_empty(cache: Cache) -> bool:
    """Return whether a cache is known to hold no token."""
    try:
        return int(cache.get_seq_length()) == 0
    except ValueError:  # All layers are recurrent, and do not say.
        return False
