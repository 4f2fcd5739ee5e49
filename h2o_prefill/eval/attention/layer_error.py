"""Sparse against dense attention on the queries, keys and values of one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.memory_sets import held_positions
from h2o_prefill.eval.recalled_keys import RecalledKeys
from h2o_prefill.functional import (
    NO_RECALL,
    PLAIN_LOGITS,
    LogitOptions,
    next_memory,
    sparse_attention,
)
from h2o_prefill.state import PrefillState

# The softmax weights of a block of rows hold at most this many numbers (16 MiB in fp32).
_BLOCK_NUMBERS = 1 << 22


class LayerMeasures(NamedTuple):
    """What `measure_layer` found for the rows of each chunk, on the CPU."""

    difference: Tensor  # fp64 [chunks, Hq]: sum |sparse - dense| of the outputs
    size: Tensor  # fp64 [chunks, Hq]: sum |dense|
    mass: Tensor  # fp64 [chunks, Hq]: dense softmax mass on visible keys, summed over rows
    lowest_mass: Tensor  # fp64 [chunks, Hq]: that of the row with the least
    memory: Tensor  # int32 [chunks, Hkv, K + L + H]: the set after each chunk, -1 where absent


def measure_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: PrefillConfig,
    recalled: RecalledKeys | None = None,
    options: LogitOptions = PLAIN_LOGITS,
) -> LayerMeasures:
    """Prefill one layer sparsely, a chunk a call, and compare it with dense attention.

    q, k and v are [1, H, T, D], of the whole prompt. The masses leave out attention sinks.
    """
    # In 16 bits the rounding of two outputs would count as the error of one.
    query, key, value = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    length = query.shape[2]
    state: PrefillState | None = None
    chunks: list[tuple[Tensor, ...]] = []
    for begin in range(0, length, config.chunk_size):
        end = min(begin + config.chunk_size, length)
        q, k, v = query[:, :, begin:end], key[:, :, :end], value[:, :, :end]
        lists = NO_RECALL if recalled is None else recalled.of_rows(begin, end, q.device)
        # The dense tail is that of the prompt, not of the chunk.
        call = config.replace(dense_tail=max(0, config.dense_tail - (length - end)))
        sparse, state = sparse_attention(q, k, v, state, call, lists, *options)
        dense = ops.dense_attention(q, k, v, *options)
        mass = _visible_mass(q[0], k[0], begin, state.memory[0], recalled, call, options)
        chunks.append(
            (
                (sparse - dense)[0].abs().sum((1, 2), dtype=torch.float64),
                dense[0].abs().sum((1, 2), dtype=torch.float64),
                mass.sum(1),
                mass.amin(1),
                next_memory(state, config)[0],
            )
        )
    return LayerMeasures(*(torch.stack(column).cpu() for column in zip(*chunks, strict=True)))


def _visible_mass(
    q: Tensor,
    k: Tensor,
    begin: int,
    memory: Tensor,
    recalled: RecalledKeys | None,
    config: PrefillConfig,
    options: LogitOptions,
) -> Tensor:
    """Return the dense softmax mass on the keys that rows of one chunk see, fp64 [Hq, rows].

    q [Hq, rows, D] are the rows from `begin` on, k [Hkv, begin + rows, D] all keys up to them,
    memory [Hkv, M] the sets that they attend to. The last `config.dense_tail` rows see every key.
    """
    scale, _, softcap = options
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    end = k.shape[1]
    held = held_positions(memory, end)
    groups = q.unflatten(0, (k.shape[0], -1))
    step = max(1, _BLOCK_NUMBERS // (q.shape[0] * end))
    masses = []
    for first in range(begin, end, step):
        last = min(first + step, end)
        group_q = groups[:, :, first - begin : last - begin].flatten(1, 2)
        logits = (group_q @ k[:, :last].transpose(1, 2)).mul_(factor)
        if softcap > 0:
            logits.div_(softcap).tanh_().mul_(softcap)
        # [Hkv, G, rows, keys], and masks that the heads of a group share.
        logits = logits.unflatten(1, (-1, last - first))
        row = torch.arange(first, last, device=q.device).unsqueeze(1)
        key = torch.arange(last, device=q.device)
        visible = (key >= begin) | (row >= end - config.dense_tail)
        if recalled is not None:
            visible = visible | recalled.mask(first, last).to(q.device)
        visible = visible | held[:, :last].unsqueeze(1)
        weights = logits.masked_fill_(key > row, -torch.inf).softmax(-1)
        weights.masked_fill_(~visible.unsqueeze(1), 0)
        masses.append(weights.sum(-1, dtype=torch.float64).flatten(0, 1))
    return torch.cat(masses, dim=1)
