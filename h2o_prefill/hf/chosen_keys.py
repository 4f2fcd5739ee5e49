"""Models that choose their own keys: what their masks lack when attention is not eager or sdpa.

Their layers hide the keys that they did not choose themselves, but only for those two names. For
every other they pass the choice to the attention function and leave the mask alone.
"""

from __future__ import annotations

from typing import Any

import torch

from h2o_prefill.hf.attention_call import Call


def hide_other_keys(call: Call, mask: Any) -> Any:
    """Return a mask of eager or sdpa attention that shows the keys alone that the model chose."""
    blocks = call.kwargs.get("block_indices")
    if blocks is not None:
        positions = call.kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(call.past, call.key.shape[2], device=call.query.device)
        positions = (positions if positions.ndim > 1 else positions[None]).expand(
            call.query.shape[0], -1
        )
        indexer: Any = call.module.indexer
        return indexer.build_block_mask(
            blocks, mask, call.key.shape[2], call.query.dtype, call.query.device, positions
        )
    chosen = call.kwargs["indices"].long()
    shape = (*chosen.shape[:2], call.key.shape[2])
    hidden = torch.ones(shape, dtype=torch.bool, device=chosen.device).scatter(-1, chosen, False)
    if mask is None:
        mask = torch.ones(shape[1:], dtype=torch.bool, device=chosen.device).tril(call.past)
    if mask.dtype == torch.bool:
        return mask & ~hidden[:, None]
    return mask.masked_fill(hidden[:, None], torch.finfo(call.query.dtype).min)
