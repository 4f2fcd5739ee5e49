"""Linear attention, the sibling of the method: recurrent, chunkwise and in both directions.

A feature map phi replaces the softmax, so that the past of a token is one matrix:

    S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i,    out_i = scale phi(q_i) S_i.

g_i <= 0 is the logarithm of a decay; without one it is 0. With the normalizer z_i = exp(g_i)
z_{i-1} + phi(k_i) the output is phi(q_i) S_i / (phi(q_i) . z_i), an average of the values.

Parameters, shapes and results as for `h2o_prefill.ops.chunkwise_linear_attention`. float64 is
computed in float64, everything else in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": F.relu,
    "identity": lambda x: x,
}


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_normalizer: Tensor | None = None,
    feature_map: str = "elu+1",
    normalize: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend token by token: O(T D Dv) time, a state of constant size, nothing in parallel."""
    queries, keys, values, decay = _prepare(q, k, v, log_decay, feature_map)
    state = _given_or_zeros(initial_state, keys, (k.shape[3], v.shape[3]))
    normalizer = _given_or_zeros(initial_normalizer, keys, (k.shape[3],))
    weighted = queries.new_empty(*queries.shape[:4], v.shape[3])
    weights = queries.new_empty(queries.shape[:4])
    for i in range(q.shape[2]):
        kept = decay[:, :, i, None].exp()
        state = kept[..., None] * state + keys[:, :, i, :, None] * values[:, :, i, None, :]
        normalizer = kept * normalizer + keys[:, :, i]
        weighted[:, :, :, i] = torch.einsum("bhgd,bhdv->bhgv", queries[:, :, :, i], state)
        weights[:, :, :, i] = torch.einsum("bhgd,bhd->bhg", queries[:, :, :, i], normalizer)
    return _finish(weighted, weights, q.dtype, normalize, scale), state, normalizer


def chunkwise_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_normalizer: Tensor | None = None,
    feature_map: str = "elu+1",
    chunk_size: int = 64,
    normalize: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend chunk by chunk: in parallel inside a chunk, with a state from chunk to chunk.

    For a chunk that starts with state S, and A_ij = phi(q_i) . phi(k_j) over its keys j <= i,
    out = A V + phi(Q) S. O(T (C (D + Dv) + D Dv)) time, O(C^2 + D Dv) memory.
    """
    queries, keys, values, decay = _prepare(q, k, v, log_decay, feature_map)
    state = _given_or_zeros(initial_state, keys, (k.shape[3], v.shape[3]))
    normalizer = _given_or_zeros(initial_normalizer, keys, (k.shape[3],))
    weighted = queries.new_empty(*queries.shape[:4], v.shape[3])
    weights = queries.new_empty(queries.shape[:4])
    for begin in range(0, q.shape[2], chunk_size):
        rows = slice(begin, begin + chunk_size)
        q_c, k_c, v_c = queries[:, :, :, rows], keys[:, :, rows], values[:, :, rows]
        within = decay_matrix(decay[:, :, rows])
        from_start = decay[:, :, rows].cumsum(2).exp()
        to_end = within[:, :, -1]

        intra = torch.einsum("bhgid,bhjd->bhgij", q_c, k_c) * within.unsqueeze(2)
        inter = q_c * from_start[:, :, None, :, None]
        weighted[:, :, :, rows] = intra @ v_c.unsqueeze(2) + inter @ state.unsqueeze(2)
        weights[:, :, :, rows] = intra.sum(4) + torch.einsum("bhgid,bhd->bhgi", inter, normalizer)

        kept = from_start[:, :, -1, None]
        arriving = k_c * to_end.unsqueeze(3)
        state = kept.unsqueeze(3) * state + arriving.transpose(2, 3) @ v_c
        normalizer = kept * normalizer + arriving.sum(2)
    return _finish(weighted, weights, q.dtype, normalize, scale), state, normalizer


def bidirectional_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    feature_map: str = "elu+1",
    diagonal_once: bool = False,
    normalize: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend forwards and backwards, and add up: for encoders.

    The backward direction is the forward one over the reversed sequence, decays included. Each
    token sees itself in both, so it counts twice, unless `diagonal_once`. The normalizer is
    also the sum of both directions.
    """
    queries, keys, values, decay = _prepare(q, k, v, log_decay, feature_map)
    backwards = decay_matrix(decay.flip(2)).flip(2, 3)
    within = decay_matrix(decay) + backwards
    if diagonal_once:
        within = within - torch.eye(q.shape[2], dtype=within.dtype, device=within.device)
    matrix = torch.einsum("bhgid,bhjd->bhgij", queries, keys) * within.unsqueeze(2)
    return _finish(matrix @ values.unsqueeze(2), matrix.sum(4), q.dtype, normalize, scale)


def decay_matrix(log_decay: Tensor) -> Tensor:
    """Return the factor exp(g_{j+1} + ... + g_i) that token j has at token i, [B, H, T, T].

    log_decay [B, H, T]. The factor is 1 on the diagonal and 0 above it. Each entry is summed
    separately: a difference of two long sums would lose digits, and make NaN of two infinite ones.
    """
    length = log_decay.shape[2]
    ones = torch.ones(length, length, dtype=torch.bool, device=log_decay.device)
    steps = log_decay.unsqueeze(3).expand(-1, -1, -1, length).masked_fill(~ones.tril(-1), 0)
    return steps.cumsum(2).masked_fill(~ones.tril(), -torch.inf).exp()


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, feature_map: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return phi(q) [B, Hkv, G, T, D], phi(k), v and g [B, Hkv, T] in the dtype computed in."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    phi = FEATURE_MAPS[feature_map]
    if log_decay is None:
        log_decay = k.new_zeros(k.shape[1])
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])
    queries = phi(q.to(dtype)).unflatten(1, (k.shape[1], -1))
    return queries, phi(k.to(dtype)), v.to(dtype), log_decay.to(dtype)


def _given_or_zeros(given: Tensor | None, keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    return keys.new_zeros(*keys.shape[:2], *shape) if given is None else given.to(keys.dtype)


def _finish(
    weighted: Tensor, weights: Tensor, dtype: torch.dtype, normalize: bool, scale: float | None
) -> Tensor:
    if normalize:
        weights = weights.unsqueeze(4)
        zero = weights == 0
        out = (weighted / weights.masked_fill(zero, 1)).masked_fill(zero, 0)
    else:
        out = weighted * (1.0 if scale is None else scale)
    return out.flatten(1, 2).to(dtype)
