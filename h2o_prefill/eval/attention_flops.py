"""Attention flops of a prefill, counted in query-key products, dense and sparse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.recalled_keys import RecalledKeys, find_recalled


@dataclass(frozen=True)
class AttentionFlops:
    """Attention flops of sparse prefill, relative to dense."""

    ratio: float  # query-key products, dense over sparse
    # Upper bound of the recalled keys that a row sees, mean of all rows; None if recall is off.
    recalled_keys: float | None


def count_attention_flops(
    prompts: Tensor,
    config: PrefillConfig,
    num_layers: int = 1,
    kv_heads: int = 1,
    token_text: Tensor | None = None,
) -> AttentionFlops:
    """Count the attention flops of prompts [prompts, T], each prefilled in one call.

    Dense layers and prompts that are too short for a sparse call count as dense, wide layers and
    heads with their own memory sets. Lexical recall is run on every prompt.
    """
    count, length = prompts.shape
    if not config.is_sparse_call(0, length):
        return AttentionFlops(1.0, 0.0 if config.recall else None)
    dense = count * dense_dot_products(length)
    recalled = sum(
        recalled_dot_products(length, find_recalled(prompt.unsqueeze(0), config, token_text))
        for prompt in prompts
    )
    all_layers = sum(
        dense
        if layer in config.dense_layers
        else recalled
        + count * sparse_dot_products(length, config.of_layer(layer), kv_heads=kv_heads)
        for layer in range(num_layers)
    )
    return AttentionFlops(
        ratio=num_layers * dense / all_layers,
        recalled_keys=recalled / (count * length) if config.recall else None,
    )


def dense_dot_products(num_tokens: int) -> int:
    """Count the query-key products of causal attention over one head: N (N + 1) / 2."""
    return num_tokens * (num_tokens + 1) // 2


def sparse_dot_products(
    num_tokens: int,
    config: PrefillConfig,
    recalled: RecalledKeys | None = None,
    kv_heads: int = 1,
) -> int:
    """Count the query-key products of one head when a prompt is prefilled sparsely in one call.

    Phase 1 takes s (s + 1) / 2 for a chunk of s tokens, phase 2 s * |M|, with |M| the most that a
    memory set can hold by then, as a mean of the heads, before errors widen it. Recalled keys are
    added, and all keys of the rows of a dense tail, whose sparse attention is computed too, because
    it updates the scores.
    """
    wider = sum(factor - 1 for *_, factor in config.wide_heads) / kv_heads
    budget = config.local_window + config.heavy_budget
    memory_size = config.sink_tokens + round(budget * (1 + wider))
    total = recalled_dot_products(num_tokens, recalled)
    for begin in range(0, num_tokens, config.chunk_size):
        rows = min(config.chunk_size, num_tokens - begin)
        total += dense_dot_products(rows) + rows * min(memory_size, begin)
    tail = min(config.dense_tail, num_tokens)
    return total + dense_dot_products(num_tokens) - dense_dot_products(num_tokens - tail)


def recalled_dot_products(num_tokens: int, recalled: RecalledKeys | None) -> int:
    """Count recalled keys times the rows that see them; an upper bound: sets may contain some."""
    if recalled is None:
        return 0
    ends = torch.arange(0, num_tokens, recalled.block).add(recalled.block).clamp(max=num_tokens)
    sizes = recalled.offsets.long().diff()
    return int((ends.repeat_interleave(sizes) - recalled.visible_from).sum())
