"""Sparse against dense attention on the queries, keys and values of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.visibility import visible_keys
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


@dataclass(frozen=True)
class LayerMeasures:
    """Sums over the rows of each chunk, on the CPU.

    Attributes
    ----------
    difference, size : Tensor
        fp64 [chunks, Hq]: sum |sparse - dense| and sum |dense| of the outputs.
    mass : Tensor
        fp64 [chunks, Hq]: dense softmax mass on the keys that a row sees, summed over rows.
    lowest_mass : Tensor
        fp64 [chunks, Hq]: that of the row with the least.
    memory : Tensor
        int32 [chunks, Hkv, K + L + H]: the set after each chunk, -1 where absent.
    """

    difference: Tensor
    size: Tensor
    mass: Tensor
    lowest_mass: Tensor
    memory: Tensor


def measure_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: PrefillConfig,
    recalled: RecalledKeys | None = None,
    options: LogitOptions = PLAIN_LOGITS,
) -> LayerMeasures:
    """Prefill one layer sparsely, a chunk a call, beside dense attention.

    Parameters
    ----------
    query, key, value : Tensor
        [1, Hq, T, D], [1, Hkv, T, D], [1, Hkv, T, Dv], the whole prompt.
    config : PrefillConfig
    recalled : RecalledKeys, optional
        What `find_recalled` returned for the prompt.
    options : LogitOptions
        Softmax scale, sinks and softcap. The masses are of all keys without the sinks.
    """
    scale, _, softcap = options
    # In 16 bits the rounding of two outputs would count as the error of one.
    query, key, value = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    length = query.shape[2]
    state: PrefillState | None = None
    chunks: list[tuple[Tensor, ...]] = []
    for begin in range(0, length, config.chunk_size):
        end = min(begin + config.chunk_size, length)
        q, k, v = query[:, :, begin:end], key[:, :, :end], value[:, :, :end]
        lists = NO_RECALL if recalled is None else recalled.of_rows(begin, end, q.device)
        # The tail is the prompt's, not the chunk's.
        tail = max(0, config.dense_tail - (length - end))
        sparse, state = sparse_attention(
            q,
            k,
            v,
            state,
            config if tail == config.dense_tail else config.replace(dense_tail=tail),
            lists,
            *options,
        )
        dense = ops.dense_attention(q, k, v, *options)
        tail_begin = length - config.dense_tail
        mass = _visible_mass(
            q[0], k[0], begin, state.memory[0], recalled, tail_begin, scale, softcap
        )
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
    tail_begin: int,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Return the dense softmax mass that falls on visible keys, fp64 [Hq, rows].

    q [Hq, rows, D] are the rows from `begin` on, k [Hkv, begin + rows, D] all keys up to them,
    memory [Hkv, M] what they attend to.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    heads, end = q.shape[0], k.shape[1]
    groups = q.unflatten(0, (k.shape[0], -1))
    step = max(1, _BLOCK_NUMBERS // (heads * end))
    blocks = []
    for first in range(begin, end, step):
        rows = range(first, min(first + step, end))
        group_q = groups[:, :, rows.start - begin : rows.stop - begin].flatten(1, 2)
        logits = group_q @ k[:, : rows.stop].transpose(1, 2)
        # [Hkv, G, rows, keys] beside masks that the heads of a group share.
        logits = logits.mul_(factor).unflatten(1, (-1, len(rows)))
        if softcap > 0:
            logits.div_(softcap).tanh_().mul_(softcap)
        row = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1)
        logits.masked_fill_(torch.arange(rows.stop, device=q.device) > row, -torch.inf)
        visible = visible_keys(rows, begin, memory, recalled, tail_begin)
        weights = logits.softmax(-1).masked_fill_(~visible.unsqueeze(1), 0)
        blocks.append(weights.sum(-1, dtype=torch.float64).flatten(0, 1))
    return torch.cat(blocks, dim=1)
