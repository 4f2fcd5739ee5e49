"""Budgets by KV head, and how they grow where errors are large.

With `error_rows`, a few rows of each chunk also attend exactly to everything before them. The error
of a head is

    e = mean of |o_sparse - o_exact|^2 / |o_exact|^2

over these rows and the query heads of its group. A head above the threshold has L and H doubled for
the chunks that follow. Nothing shrinks.
Queries and keys of earlier chunks alone decide, so this is strictly causal.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.reference.attention import intra_chunk_attention
from h2o_prefill.reference.memory import build_memory_set

_WORD = 2**64


def error_rows(begin: int, rows: int, count: int) -> list[int]:
    """Return which of a chunk's rows, counted from its first, are measured.

    One of each of `count` equal parts, by SplitMix64's finaliser of the part's first position:
    fixed strides would coincide with recall blocks.
    """
    chosen = []
    for i in range(min(count, rows)):
        first, end = (rows * part // min(count, rows) for part in (i, i + 1))
        x = (begin + first + 0x9E3779B97F4A7C15) % _WORD
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
        chosen.append(first + (x ^ (x >> 31)) % (end - first))
    return chosen


class HeadBudgets:
    """The budgets of a layer's KV heads during one call."""

    def __init__(self, config: Any, batch: int, heads: int, errors: Tensor | None) -> None:
        self.config = config
        if errors is None:
            errors = torch.zeros(batch, heads, 4)
        # For each head: doublings of L and H, the sum of errors, their number, the sum of factors.
        self.errors = errors.cpu().clone()
        widest = config.max_widen if config.error_rows > 0 else 1
        self.most_doublings = widest.bit_length() - 1
        self.width = config.sink_tokens + (config.local_window + config.heavy_budget) * widest

    def select(self, scores: Tensor, previous: Tensor, chunk_begin: int, chunk_end: int) -> Tensor:
        """Build the sets of the chunk after [chunk_begin, chunk_end), int32 [B, Hkv, width]."""
        batch, heads = scores.shape[:2]
        sets = torch.full((batch, heads, self.width), -1, dtype=torch.int32, device=scores.device)
        config = self.config
        for b, h in itertools.product(range(batch), range(heads)):
            factor = 1 << min(int(self.errors[b, h, 0]), self.most_doublings)
            sizes = factor * config.local_window, factor * config.heavy_budget, config.sink_tokens
            one = (slice(b, b + 1), slice(h, h + 1))
            chosen = build_memory_set(previous[one], chunk_begin, chunk_end, scores[one], *sizes)
            sets[b, h, : chosen.shape[2]] = chosen[0, 0]
        return sets

    def measure(
        self, call: tuple[Tensor, Tensor, Tensor], out: Tensor, begin: int, end: int, options: Any
    ) -> None:
        """Record the errors of the chunk [begin, end) of a call.

        Its queries and out are [B, Hkv, G, Tq, ...], its keys and values [B, Hkv, 1, T, ...].
        """
        queries, keys, values = call
        past = keys.shape[3] - queries.shape[3]
        chosen = error_rows(begin, end - begin, self.config.error_rows)
        if not chosen:
            return
        rows = torch.tensor(chosen, device=queries.device) + begin - past
        mask = torch.arange(end, device=rows.device) <= past + rows[:, None]
        exact, _ = intra_chunk_attention(
            queries[:, :, :, rows], keys[:, :, :, :end], values[:, :, :, :end], mask, **options
        )
        missed = (out[:, :, :, rows] - exact).square().sum(-1)
        size = exact.square().sum(-1)
        ratio = torch.where(size > 0, missed / size, torch.zeros_like(size))
        self.record(ratio.mean(dim=(2, 3)).cpu())

    def record(self, error: Tensor) -> None:
        """Record the errors [B, Hkv] of a chunk; double the budgets of heads with large ones."""
        doublings, total, number, factors = self.errors.unbind(2)
        factors += doublings.exp2()
        doublings += (error > self.config.error_threshold) & (doublings < self.most_doublings)
        total += error
        number += 1
