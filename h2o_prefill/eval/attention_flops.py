"""Attention flops of a prefill, counted in query-key products, dense and sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.state import CHUNKS, FACTOR_SUM


@dataclass(frozen=True)
class AttentionFlops:
    """Attention flops of sparse prefill, relative to dense."""

    ratio: float  # query-key products, dense over sparse
    # Upper bound of the recalled keys that a row sees, mean of all rows; None if recall is off.
    recalled_keys: float | None
    # By which errors multiplied L and H, mean of chunks and KV heads; None if none were measured.
    widening: float | None = None


def count_attention_flops(
    prompts: Tensor,
    config: PrefillConfig,
    num_layers: int = 1,
    kv_heads: int = 1,
    token_text: Tensor | None = None,
    errors: Sequence[Mapping[int, Tensor]] = (),
) -> AttentionFlops:
    """Count the attention flops of prompts [prompts, T], each prefilled in one call.

    Dense layers and prompts that are too short for a sparse call count as dense. Lexical recall is
    run on every prompt. `errors` has `LayerState.errors` of each layer after each prompt: without
    them memory sets count as they are before errors widen them.
    """
    count, length = prompts.shape
    if not config.is_sparse_call(0, length):
        return AttentionFlops(1.0, 0.0 if config.recall else None)
    dense = count * dense_dot_products(length)
    recalled = sum(
        recalled_dot_products(length, config, find_recalled(prompt[None], config, token_text))
        for prompt in prompts
    )
    factors: list[Tensor] = []  # of every prompt and layer, by KV head
    total = 0
    for layer in range(num_layers):
        if layer in config.dense_layers:
            total += dense
            continue
        total += recalled
        settings = config.of_layer(layer)
        for by_layer in errors or [{}] * count:
            widening = None
            if layer in by_layer and by_layer[layer][0, 0, CHUNKS] > 0:
                measured = by_layer[layer][0].double()
                widening = measured[:, FACTOR_SUM] / measured[:, CHUNKS]
                factors.append(widening)
            total += sparse_dot_products(length, settings, kv_heads=kv_heads, widening=widening)
    return AttentionFlops(
        ratio=num_layers * dense / total,
        recalled_keys=recalled / (count * length) if config.recall else None,
        widening=torch.cat(factors).mean().item() if factors else None,
    )


def dense_dot_products(num_tokens: int) -> int:
    """Count the query-key products of causal attention over one head: N (N + 1) / 2."""
    return num_tokens * (num_tokens + 1) // 2


def sparse_dot_products(
    num_tokens: int,
    config: PrefillConfig,
    recalled: RecallLists = NO_RECALL,
    kv_heads: int = 1,
    widening: Tensor | None = None,
) -> int:
    """Count the query-key products of one head when a prompt is prefilled sparsely in one call.

    Phase 1 takes s (s + 1) / 2 for a chunk of s tokens, phase 2 s |M|, as a mean of the heads.
    `widening` [Hkv] are the factors of L and H by errors, as a mean of the chunks; rows that
    measure errors see all keys before them. Recalled keys are added, and all keys of the rows of a
    dense tail, whose sparse attention is computed too, because it updates the scores.
    """
    factors = torch.ones(kv_heads, dtype=torch.float64) if widening is None else widening
    budget = config.local_window + config.heavy_budget
    sizes = [config.sink_tokens + round(budget * factor) for factor in factors.tolist()]
    total, memory = recalled_dot_products(num_tokens, config, recalled), 0
    for begin in range(0, num_tokens, config.chunk_size):
        rows = min(config.chunk_size, num_tokens - begin)
        total += dense_dot_products(rows)
        memory += rows * sum(min(size, begin) for size in sizes)
        if begin > 0:
            total += min(config.error_rows, rows) * (begin + rows // 2)
    total += round(memory / kv_heads)
    tail = min(config.dense_tail, num_tokens)
    return total + dense_dot_products(num_tokens) - dense_dot_products(num_tokens - tail)


def recalled_dot_products(num_tokens: int, config: PrefillConfig, recalled: RecallLists) -> int:
    """Count recalled keys times the rows that see them; an upper bound: sets may contain some."""
    offsets, _, visible_from = recalled
    if offsets is None or visible_from is None:
        return 0
    block = config.recall_block
    ends = torch.arange(0, num_tokens, block, device=offsets.device).add(block)
    rows = ends.clamp(max=num_tokens).repeat_interleave(offsets.long().diff())
    return int((rows - visible_from).sum())


def find_recalled(
    prompt: Tensor, config: PrefillConfig, token_text: Tensor | None = None
) -> RecallLists:
    """Search a prompt, int64 [1, T], for the keys that a sparse prefill of it would recall."""
    return ops.lexical_recall(prompt, 0, config, token_text) if config.recall else NO_RECALL
