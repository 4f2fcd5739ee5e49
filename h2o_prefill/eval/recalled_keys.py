"""The keys that lexical recall finds in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import recall_lists


@dataclass(frozen=True)
class RecalledKeys:
    """The lists of `ops.lexical_recall` for a whole prompt."""

    offsets: Tensor  # int32 [blocks + 1]: block b's entries are [offsets[b], offsets[b + 1])
    positions: Tensor  # int32 [entries]: a key
    visible_from: Tensor  # int32 [entries]: the first row that sees it
    block: int  # rows of a block

    def of_rows(
        self, begin: int, end: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three lists of the call over rows [begin, end); `begin` starts a block."""
        offsets = self.offsets[begin // self.block : -(-end // self.block) + 1]
        entries = slice(int(offsets[0]), int(offsets[-1]))
        return (
            (offsets - offsets[0]).to(device),
            self.positions[entries].to(device),
            self.visible_from[entries].to(device),
        )

    def mask(self, begin: int, end: int) -> Tensor:
        """Return bool [end - begin, end]: whether a row of [begin, end) recalls a key."""
        mask = torch.zeros(end - begin, end, dtype=torch.bool)
        for index in range(begin // self.block, -(-end // self.block)):
            first, last = max(begin, index * self.block), min(end, (index + 1) * self.block)
            entries = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
            seen = self.visible_from[entries] <= torch.arange(first, last).unsqueeze(1)
            mask[first - begin : last - begin, self.positions[entries].long()] = seen
        return mask


def find_recalled(
    prompt: Tensor, config: PrefillConfig, token_text: Tensor | None = None
) -> RecalledKeys | None:
    """Search a prompt, int64 [1, T], as a sparse prefill of it would; None if recall is off."""
    if config.recall == 0:
        return None
    lists = recall_lists(prompt.cpu(), 0, config, token_text)
    return RecalledKeys(*lists, block=config.recall_block)
