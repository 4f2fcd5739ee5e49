"""Attention inside a chunk, and its fusion with attention to the memory set.

Attention inside a chunk is ordinary causal attention; positions are absolute.
RoPE rotates a key by its absolute position, so later chunks use a cached key unchanged.

A later chunk attends to two disjoint sets of keys, the memory set and itself. A softmax over both
needs three numbers of each: the largest logit m, the sum l of exp(logit - m), and the sum o of the
values with these weights. Two such states merge exactly (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018).

Leading dimensions ("...", heads for example) may be any number and broadcast. `scale` defaults to
D^-0.5. A `softcap` > 0 caps logits after scaling: softcap * tanh(z / softcap). `sinks` [..., 1] are
one more logit of each row's softmax, neither scaled nor capped, without a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float = 10000.0) -> Tensor:
    """Return the angle per position of each pair of dimensions, fp32 [head_dim / 2].

    theta^(-2i / head_dim), Su et al., "RoFormer", 2021.
    """
    return theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)


def apply_rope_global(
    q: Tensor, k: Tensor, chunk_idx: int, chunk_size: int, rope_freqs: Tensor, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """Apply RoPE to the tokens of a chunk, q and k [..., s, D], by their absolute positions.

    The first token is at begin + chunk_idx * chunk_size, where `begin` counts the tokens before the
    call. Dimensions i and i + D / 2 form a pair, as in Hugging Face's Llama.
    """
    start = begin + chunk_idx * chunk_size
    positions = torch.arange(start, start + q.shape[-2], device=q.device)
    angles = positions.unsqueeze(-1) * rope_freqs.to(q.device)
    cos = torch.cat([angles, angles], dim=-1).cos().to(q.dtype)
    sin = torch.cat([angles, angles], dim=-1).sin().to(q.dtype)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def populate_kv_cache(
    cache: Tensor, k: Tensor, v: Tensor, chunk_idx: int, chunk_size: int, begin: int = 0
) -> None:
    """Write a chunk's k and v [H, s, D] at their positions in `cache` [2, H, max_seq_len, D]."""
    length, max_seq_len = k.shape[-2], cache.shape[-2]
    start = begin + chunk_idx * chunk_size
    if length > chunk_size:
        raise ValueError(
            f"a chunk must have at most chunk_size ({chunk_size}) tokens, got {length}"
        )
    if start < 0 or start + length > max_seq_len:
        raise ValueError(
            f"positions must be in [0, {max_seq_len}), got [{start}, {start + length})"
        )
    cache[0, :, start : start + length] = k
    cache[1, :, start : start + length] = v


def causal_mask(num_queries: int, num_keys: int | None = None, window: int | None = None) -> Tensor:
    """Return bool [num_queries, num_keys], True where visible; the last query sees the last key.

    By default there are as many keys as queries: lower triangular. With a window, a query sees the
    last `window` keys up to its own.
    """
    keys = num_queries if num_keys is None else num_keys
    past = keys - num_queries
    mask = torch.ones(num_queries, keys, dtype=torch.bool).tril(diagonal=past)
    return mask if window is None else mask.triu(diagonal=max(past - window + 1, -num_queries))


def masked_logits(
    q: Tensor, k: Tensor, mask: Tensor, scale: float | None = None, softcap: float = 0.0
) -> Tensor:
    """Return the logits of q [..., queries, D] and k [..., keys, D]; -inf where mask is False."""
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.transpose(-1, -2))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~mask.to(q.device), -torch.inf)


def softmax_weights(logits: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return softmax(logits) and its lse; weights are 0, not nan, in a row that sees no key."""
    lse = logits.logsumexp(dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    return (logits - _finite(lse).unsqueeze(-1)).exp(), lse


def intra_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal_mask: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend inside one chunk; the column sums of the weights are the keys' first scores.

    q [..., queries, D], k and v [..., keys, D or Dv], causal_mask bool [queries, keys]. Returns the
    output [..., queries, Dv] and the weights [..., queries, keys].
    """
    weights, _ = softmax_weights(masked_logits(q, k, causal_mask, scale, softcap), sinks)
    return weights @ v, weights


@dataclass
class OnlineSoftmaxState:
    """The running state of a softmax over blocks of keys."""

    m: Tensor  # [..., queries], running max; -inf where a query has seen no key
    l: Tensor  # noqa: E741  # [..., queries], running denominator
    o: Tensor  # [..., queries, Dv], running numerator


def init_online_softmax_from_inter(inter_logits: Tensor, V_mem: Tensor) -> OnlineSoftmaxState:
    """Start from the logits [..., queries, M], -inf at absent keys, and the values [..., M, Dv]."""
    if inter_logits.shape[-1] == 0:
        m = inter_logits.new_full(inter_logits.shape[:-1], -torch.inf)
    else:
        m = inter_logits.amax(dim=-1)
    exp_logits = (inter_logits - _finite(m).unsqueeze(-1)).exp()
    return OnlineSoftmaxState(m, exp_logits.sum(dim=-1), exp_logits @ V_mem)


def update_online_softmax_with_intra(
    state: OnlineSoftmaxState, intra_logits: Tensor, V: Tensor
) -> OnlineSoftmaxState:
    """Return the state after a further block of keys; logits are -inf where masked."""
    return merge_online_softmax(state, init_online_softmax_from_inter(intra_logits, V))


def merge_online_softmax(a: OnlineSoftmaxState, b: OnlineSoftmaxState) -> OnlineSoftmaxState:
    """Return the state of a softmax over the keys of both."""
    m = torch.maximum(a.m, b.m)
    of_a, of_b = (a.m - _finite(m)).exp(), (b.m - _finite(m)).exp()
    return OnlineSoftmaxState(
        m, a.l * of_a + b.l * of_b, a.o * of_a.unsqueeze(-1) + b.o * of_b.unsqueeze(-1)
    )


def finalize_online_softmax(state: OnlineSoftmaxState) -> Tensor:
    """Return the attention output o / l, [..., queries, Dv]; 0 for a query that saw no key."""
    empty = state.l == 0
    return state.o / state.l.masked_fill(empty, 1).unsqueeze(-1)


def fused_chunk_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    K_mem: Tensor,
    V_mem: Tensor,
    causal_mask: Tensor,
    memory_mask: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    recalled: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the memory set and to the chunk itself as if one softmax had run over both.

    Q [..., queries, D]; K, V [..., S, D or Dv], the chunk; K_mem, V_mem [..., M, D or Dv], the
    memory set, all of it visible except where memory_mask, bool [..., M], is False. `recalled` are
    keys, values and mask, bool [..., queries, keys], of a third set, which gets no scores.

    Returns the output [..., queries, Dv], and the weights of a softmax over the memory alone and of
    one over the chunk alone: their column sums are added to the memory's scores, and are the
    chunk's first scores.
    """
    if memory_mask is None:
        memory_mask = torch.ones(K_mem.shape[:-1], dtype=torch.bool, device=K_mem.device)
    inter_logits = masked_logits(Q, K_mem, memory_mask.unsqueeze(-2), scale, softcap)
    intra_logits = masked_logits(Q, K, causal_mask, scale, softcap)
    state = init_online_softmax_from_inter(inter_logits, V_mem)
    state = update_online_softmax_with_intra(state, intra_logits, V)
    if recalled is not None:
        keys, values, mask = recalled
        logits = masked_logits(Q, keys, mask, scale, softcap)
        state = update_online_softmax_with_intra(state, logits, values)
    if sinks is not None:  # one more key with the value 0
        m = sinks.expand_as(state.m)
        without_value = OnlineSoftmaxState(m, torch.ones_like(m), torch.zeros_like(state.o))
        state = merge_online_softmax(state, without_value)
    inter_weights, _ = softmax_weights(inter_logits, sinks)
    intra_weights, _ = softmax_weights(intra_logits, sinks)
    return finalize_online_softmax(state), inter_weights, intra_weights


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m == -torch.inf, 0)
