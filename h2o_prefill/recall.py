"""Lexical recall with the settings of a config."""

from __future__ import annotations

from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig


def recall_lists(
    token_ids: Tensor, begin: int, config: PrefillConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Search a prompt as `config` says, for the calls of `ops.chunked_sparse_attention`.

    Parameters
    ----------
    token_ids : Tensor
        int64 [B, T_total], the prompt up to the end of the call.
    begin : int
        Where the call begins.
    config : PrefillConfig
        With `recall` > 0.

    Returns
    -------
    offsets, positions, visible_from : Tensor
        As `ops.lexical_recall` returns them.
    """
    return ops.lexical_recall(
        token_ids,
        begin,
        config.chunk_size,
        config.recall_block,
        config.recall,
        config.recall_suffix,
        config.recall_span,
        config.recall_max_count,
    )
