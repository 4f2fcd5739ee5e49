r"""Task 5 of the method: fuse attention over the memory set with attention inside the chunk.

Both attend with the same queries over disjoint keys. A softmax over all of them needs only three
numbers of each part: the largest logit m, the sum l of exp(logit - m) and the values o weighted by
the same. Two such states merge exactly (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_prefill.reference.intra_chunk import masked_logits


@dataclass
class OnlineSoftmaxState:
    """The running state of a softmax over blocks of keys.

    Attributes
    ----------
    m : Tensor
        [num_heads, seq_len], running max; -inf where a query has seen no key.
    l : Tensor
        [num_heads, seq_len], running denominator.
    o : Tensor
        [num_heads, seq_len, head_dim], running numerator.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    o: Tensor


def init_online_softmax_from_inter(inter_logits: Tensor, V_mem: Tensor) -> OnlineSoftmaxState:
    """Initialize the state from inter-chunk attention.

    Parameters
    ----------
    inter_logits : Tensor
        [H, S, M], scaled; -inf where a memory slot is empty.
    V_mem : Tensor
        [H, M, d].
    """
    if inter_logits.shape[-1] == 0:
        m = inter_logits.new_full(inter_logits.shape[:-1], -torch.inf)
    else:
        m = inter_logits.amax(dim=-1)
    exp_logits = (inter_logits - _finite(m).unsqueeze(-1)).exp()
    return OnlineSoftmaxState(m, exp_logits.sum(dim=-1), exp_logits @ V_mem)


def update_online_softmax_with_intra(
    state: OnlineSoftmaxState,
    intra_logits: Tensor,
    V: Tensor,
) -> OnlineSoftmaxState:
    """Update the state with intra-chunk attention.

    Parameters
    ----------
    state : OnlineSoftmaxState
        Left as it is.
    intra_logits : Tensor
        [H, S, S], scaled, -inf where masked.
    V : Tensor
        [H, S, d].
    """
    block = init_online_softmax_from_inter(intra_logits, V)
    m = torch.maximum(state.m, block.m)
    keep = (state.m - _finite(m)).exp()
    add = (block.m - _finite(m)).exp()
    return OnlineSoftmaxState(
        m,
        state.l * keep + block.l * add,
        state.o * keep.unsqueeze(-1) + block.o * add.unsqueeze(-1),
    )


def finalize_online_softmax(state: OnlineSoftmaxState) -> Tensor:
    """Return the attention output o / l, [H, S, d]; 0 for a query that saw no key."""
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the memory set and to the chunk itself as if one softmax had run over both.

    Parameters
    ----------
    Q : Tensor
        [H, queries, d]. Grouped query heads are folded into the queries: [Hkv, G S, d].
    K, V : Tensor
        [H, S, d], the current chunk.
    K_mem, V_mem : Tensor
        [H, M, d], the memory set; all of it is visible to every query.
    causal_mask : Tensor
        bool [queries, S], True where visible.
    memory_mask : Tensor, optional
        bool [H, M], False where a slot of the memory set is empty.

    Returns
    -------
    output : Tensor
        [H, queries, d].
    inter_weights : Tensor
        [H, queries, M]: a softmax over the memory alone; its column sums are added to the memory's
        scores.
    intra_weights : Tensor
        [H, queries, S]: a softmax over the chunk alone; its column sums are the chunk's first
        scores.
    """
    if memory_mask is None:
        memory_mask = torch.ones(K_mem.shape[:2], dtype=torch.bool, device=K_mem.device)
    inter_logits = masked_logits(Q, K_mem, memory_mask.unsqueeze(1))
    intra_logits = masked_logits(Q, K, causal_mask)
    memory_state = init_online_softmax_from_inter(inter_logits, V_mem)
    state = update_online_softmax_with_intra(memory_state, intra_logits, V)
    inter_weights = _weights(inter_logits, memory_state)
    return finalize_online_softmax(state), inter_weights, intra_logits.softmax(dim=-1)


def _weights(logits: Tensor, state: OnlineSoftmaxState) -> Tensor:
    """Return softmax(logits), 0 instead of nan where a query sees no key."""
    exp_logits = (logits - _finite(state.m).unsqueeze(-1)).exp()
    return exp_logits / state.l.masked_fill(state.l == 0, 1).unsqueeze(-1)


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m == -torch.inf, 0)
