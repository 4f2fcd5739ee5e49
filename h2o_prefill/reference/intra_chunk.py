"""Task 2 of the method: causal attention inside one chunk.

A chunk is an ordinary causal attention of its own. Only the positions are those of the whole text:
RoPE turns a key by its absolute position, so a key in the cache serves every later chunk unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float = 10000.0) -> Tensor:
    """Return the angle per position of every pair of dimensions, fp32 [head_dim / 2].

    theta^(-2i / head_dim), Su et al., "RoFormer", 2021.
    """
    return theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)


def apply_rope_global(
    q: Tensor, k: Tensor, chunk_idx: int, chunk_size: int, rope_freqs: Tensor, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """Apply RoPE with global absolute positions.

    Parameters
    ----------
    q, k : Tensor
        [Hq, s, D] and [Hkv, s, D], the tokens of one chunk, s <= S.
    chunk_idx : int
        c; the first token of the chunk stands at begin + c S.
    chunk_size : int
        S.
    rope_freqs : Tensor
        [D / 2], as from `rope_frequencies`.
    begin : int
        Tokens before the call that the chunk belongs to.

    Returns
    -------
    tuple of Tensor
        q and k turned. Dimensions i and i + D / 2 form a pair, as in Hugging Face's Llama.
    """
    start = begin + chunk_idx * chunk_size
    positions = torch.arange(start, start + q.shape[-2], device=q.device)
    angles = positions.unsqueeze(-1) * rope_freqs.to(q.device)
    cos = torch.cat([angles, angles], dim=-1).cos().to(q.dtype)
    sin = torch.cat([angles, angles], dim=-1).sin().to(q.dtype)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def causal_mask(num_queries: int, num_keys: int | None = None) -> Tensor:
    """Return bool [num_queries, num_keys], True where a query sees a key.

    The last query sees every key. By default there are as many keys as queries: lower triangular.
    """
    keys = num_queries if num_keys is None else num_keys
    return torch.ones(num_queries, keys, dtype=torch.bool).tril(diagonal=keys - num_queries)


def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, causal_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend inside one chunk.

    Parameters
    ----------
    q : Tensor
        [H, queries, D].
    k, v : Tensor
        [H, keys, D].
    causal_mask : Tensor
        bool [queries, keys], True where visible; every query sees a key.

    Returns
    -------
    output : Tensor
        [H, queries, D].
    attention_weights : Tensor
        [H, queries, keys]; their column sums are the keys' first scores.
    """
    weights = masked_logits(q, k, causal_mask).softmax(dim=-1)
    return weights @ v, weights


def masked_logits(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return q k^T / sqrt(D), -inf where `mask` (broadcast to [H, queries, keys]) is False."""
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return logits.masked_fill(~mask.to(q.device), -torch.inf)


def populate_kv_cache(
    cache: Tensor, k: Tensor, v: Tensor, chunk_idx: int, chunk_size: int, begin: int = 0
) -> None:
    """Write K, V to the pre-allocated cache at their absolute positions.

    Parameters
    ----------
    cache : Tensor
        [2, H, max_seq_len, D], one layer's buffer; changed in place.
    k, v : Tensor
        [H, s, D], the tokens of one chunk, keys after RoPE.
    chunk_idx, chunk_size, begin : int
        As in `apply_rope_global`.

    Raises
    ------
    ValueError
        If the chunk is longer than S or does not fit into the buffer; nothing is written then.
    """
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


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
