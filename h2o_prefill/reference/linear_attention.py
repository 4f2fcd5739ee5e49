"""Linear attention, the sibling of the method: recurrent, chunkwise and in both directions.

A feature map phi replaces the softmax, so that the past of a token is one matrix:

    S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i,    out_i = scale phi(q_i) S_i.

g_i <= 0 is the logarithm of a decay; without one it is 0. With the normalizer z_i = exp(g_i)
z_{i-1} + phi(k_i) the output is phi(q_i) S_i / (phi(q_i) . z_i), an average of the values. Below,
z is one more column of S, whose values are all 1.

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
    state = _first_state(keys, values, initial_state, initial_normalizer)
    weighted = queries.new_empty(*queries.shape[:4], values.shape[3])
    for i in range(q.shape[2]):
        decayed = decay[:, :, i, None, None].exp() * state
        state = decayed + keys[:, :, i, :, None] * values[:, :, i, None, :]
        weighted[:, :, :, i] = queries[:, :, :, i] @ state
    return _output(weighted, q.dtype, normalize, scale), *_parts(state, normalize)


def chunkwise_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_normalizer: Tensor | None = None,
    feature_map: str = "elu+1",
    chunk_size: int = 64,
    causal: bool = True,
    normalize: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend chunk by chunk: in parallel inside a chunk, with a state from chunk to chunk.

    For a chunk that starts with state S, and A_ij = phi(q_i) . phi(k_j) over its keys j <= i,
    out = A V + phi(Q) S. O(T (C (D + Dv) + D Dv)) time, O(C^2 + D Dv) memory. Not `causal`, the
    output has both directions.
    """
    queries, keys, values, decay = _prepare(q, k, v, log_decay, feature_map)
    state = _first_state(keys, values, initial_state, initial_normalizer)
    weighted = queries.new_empty(*queries.shape[:4], values.shape[3])
    for begin in range(0, q.shape[2], chunk_size):
        rows = slice(begin, begin + chunk_size)
        q_c, k_c, v_c = queries[:, :, :, rows], keys[:, :, rows], values[:, :, rows]
        within = decay_matrix(decay[:, :, rows])
        from_start = decay[:, :, rows].cumsum(2).exp()
        to_end = within[:, :, -1]

        intra = (q_c @ k_c.unsqueeze(2).transpose(3, 4)) * within.unsqueeze(2)
        inter = q_c * from_start[:, :, None, :, None]
        weighted[:, :, :, rows] = intra @ v_c.unsqueeze(2) + inter @ state.unsqueeze(2)

        arriving = (k_c * to_end.unsqueeze(3)).transpose(2, 3) @ v_c
        state = from_start[:, :, -1, None, None] * state + arriving
    out = _output(weighted, q.dtype, normalize, scale)
    if not causal:
        out = bidirectional_linear_attention(q, k, v, log_decay, feature_map, normalize, scale)
    return out, *_parts(state, normalize)


def bidirectional_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    feature_map: str = "elu+1",
    normalize: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend forwards and backwards, and add up: for encoders.

    The backward direction is the forward one over the reversed sequence, decays included. Each
    token sees itself in both, so it counts twice. The normalizer is the sum of both directions too.
    """
    queries, keys, values, decay = _prepare(q, k, v, log_decay, feature_map)
    backwards = decay_matrix(decay.flip(2)).flip(2, 3)
    within = decay_matrix(decay) + backwards
    matrix = (queries @ keys.unsqueeze(2).transpose(3, 4)) * within.unsqueeze(2)
    return _output(matrix @ values.unsqueeze(2), q.dtype, normalize, scale)


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
    """Return phi(q) [B, Hkv, G, T, D], phi(k), (v, 1) and g [B, Hkv, T], in float32 or float64."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    phi = FEATURE_MAPS[feature_map]
    if log_decay is None:
        log_decay = k.new_zeros(k.shape[1])
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])
    queries = phi(q.to(dtype)).unflatten(1, (k.shape[1], -1))
    return queries, phi(k.to(dtype)), F.pad(v.to(dtype), (0, 1), value=1), log_decay.to(dtype)


def _first_state(
    keys: Tensor, values: Tensor, state: Tensor | None, normalizer: Tensor | None
) -> Tensor:
    whole = keys.new_zeros(*keys.shape[:2], keys.shape[3], values.shape[3])
    if state is not None:
        whole[..., :-1] = state
    if normalizer is not None:
        whole[..., -1] = normalizer
    return whole


def _parts(state: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return S, and z, without entries where nothing is normalized."""
    return state[..., :-1], state[..., -1] if normalize else state[..., :0, -1]


def _output(weighted: Tensor, dtype: torch.dtype, normalize: bool, scale: float | None) -> Tensor:
    out, weights = weighted[..., :-1], weighted[..., -1:]
    if normalize:
        zero = weights == 0
        out = (out / weights.masked_fill(zero, 1)).masked_fill(zero, 0)
    else:
        out = out * (1.0 if scale is None else scale)
    return out.flatten(1, 2).to(dtype)
