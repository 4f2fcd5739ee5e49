"""The operators, as documented Python functions over `torch.ops.h2o_prefill`.

Symbols: B batch, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), T tokens, D key dim, Dv value
dim, M memory size. Tensors are float32, bfloat16, float16 or float64, all of one dtype and device,
with any strides. `lse` is the natural logarithm of a softmax's denominator. lse, column sums and
scores are float32 (float64 for float64 inputs). `scale` defaults to D ** -0.5. `softcap` > 0 makes
softcap * tanh(z / softcap) of each logit z behind the scale. `sinks`, [Hq] of any of these dtypes,
are one further logit of each query head's softmax, neither scaled nor capped, without a value: the
output's denominator has it once, and so has that of each key set's softmax, of which scores are the
sums. With either of them CUDA tensors are served by composite versions. The operators are for
inference: inputs that require gradients are refused while gradients are on, except by
`chunkwise_linear_attention`, which has a gradient. A wrong argument
raises ValueError. The number of threads does not change a bit of a result, except where PyTorch's
attention computes it: `dense_attention` with few rows or in float64, and a dense tail of so few
rows. There it changes the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.h2o_prefill


def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally inside every chunk (phase 1).

    Parameters
    ----------
    q, k, v : Tensor
        [B, Hq, T, D], [B, Hkv, T, D], [B, Hkv, T, Dv].
    chunk_size : int
        S; the last chunk may be shorter.

    Returns
    -------
    out : Tensor
        [B, Hq, T, Dv]; `out.transpose(1, 2)` is contiguous.
    lse : Tensor
        [B, Hq, T].
    colsum : Tensor
        [B, Hkv, T]: attention that key j received, the sum of exp(z_ij - lse_i) over the chunk's
        queries i and the group's query heads.
    """
    return _ops.intra_chunk_attention(q, k, v, chunk_size, scale)


def memory_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with all queries to the listed keys, without a mask (phase 2).

    Parameters
    ----------
    q, k, v : Tensor
        [B, Hq, T, D]; k and v are the whole history, [B, Hkv, T_total, D] and [B, Hkv, T_total,
        Dv].
    indices : Tensor
        int32 [B, Hkv, M], positions in the history; -1 marks absent entries and stands only behind
        all others.

    Returns
    -------
    out, lse : Tensor
        [B, Hq, T, Dv] and [B, Hq, T]; 0 and -inf where there is no key.
    colsum : Tensor
        [B, Hkv, M], 0 at absent entries.
    """
    return _ops.memory_attention(q, k, v, indices, scale)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend causally to the whole history: exact, without scores.

    Without sinks and softcap uses PyTorch's attention where that is faster: on CPU for few rows of
    float32 (fewer than 16 that share a KV head, or 64 where every query head has its own) and for 2
    to 15 of bfloat16; and for float64.

    Parameters
    ----------
    q : Tensor
        [B, Hq, Tq, D], the last rows of the history.
    k, v : Tensor
        [B, Hkv, T_total, D] and [B, Hkv, T_total, Dv].

    Returns
    -------
    Tensor
        [B, Hq, Tq, Dv].
    """
    return _ops.dense_attention(q, k, v, scale, sinks, softcap)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Fuse two attention results over disjoint key sets, as if one softmax had run over both.

    Parameters
    ----------
    out_a, out_b : Tensor
        [B, H, T, Dv].
    lse_a, lse_b : Tensor
        [B, H, T]; a row with -inf contributes nothing.

    Returns
    -------
    out, lse : Tensor
        As the inputs; 0 and -inf where both are empty.
    """
    return _ops.merge_states(out_a, lse_a, out_b, lse_b)


def select_memory(
    scores: Tensor,
    memory: Tensor,
    chunk_begin: int,
    chunk_end: int,
    local_window: int,
    heavy_budget: int,
    sink_tokens: int,
) -> Tensor:
    """Build the memory set that the chunk after `chunk_end` attends to.

    Parameters
    ----------
    scores : Tensor
        [B, Hkv, Ts]; positions from Ts on have score 0.
    memory : Tensor
        int32 [B, Hkv, any]: the set that the last chunk attended to, ascending, then -1.
    chunk_begin, chunk_end : int
        The last chunk's positions [chunk_begin, chunk_end).
    local_window, heavy_budget, sink_tokens : int
        L, H and K. Kept are the first K positions, the last L before chunk_end, and the H other
        candidates with the highest scores; of equal scores the lower position wins.

    Returns
    -------
    Tensor
        int32 [B, Hkv, K + L + H], ascending, then -1.
    """
    return _ops.select_memory(
        scores, memory, chunk_begin, chunk_end, local_window, heavy_budget, sink_tokens
    )


def accumulate_scores_(scores: Tensor, memory: Tensor, colsum: Tensor) -> None:
    """Add column sums to the scores of memory sets, in place.

    Parameters
    ----------
    scores : Tensor
        [B, Hkv, T].
    memory : Tensor
        int32 [B, Hkv, M]: strictly ascending positions, then -1.
    colsum : Tensor
        [B, Hkv, M], of the dtype of scores; ignored where the index is -1.
    """
    _ops.accumulate_scores_(scores, memory, colsum)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Copy the listed rows of every head.

    Parameters
    ----------
    x : Tensor
        [B, H, T, D].
    indices : Tensor
        int32 [B, H, M]; -1 gives a row of zeros.

    Returns
    -------
    Tensor
        [B, H, M, D].
    """
    return _ops.gather_rows(x, indices)


def chunked_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor | None,
    memory: Tensor | None,
    recall_offsets: Tensor | None,
    recall_positions: Tensor | None,
    recall_visible_from: Tensor | None,
    last_chunk_begin: int,
    chunk_size: int,
    local_window: int,
    heavy_budget: int,
    sink_tokens: int = 0,
    dense_tail: int = 0,
    gqa_reduce: str = "sum",
    recall_block: int = 128,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the whole sparse prefill of one layer.

    Parameters
    ----------
    q : Tensor
        [B, Hq, Tq, D], the queries of the call.
    k, v : Tensor
        [B, Hkv, T_total, D] and [B, Hkv, T_total, Dv]: the whole history, which ends with the
        call's tokens.
    scores, memory : Tensor, optional
        [B, Hkv, <= T_total] and int32 [B, Hkv, any], as the previous call of the prompt returned
        them; None at first. Positions without a score have 0.
    recall_offsets, recall_positions, recall_visible_from : Tensor, optional
        What `lexical_recall` returned for the call: keys that a block of rows also sees. All or
        none.
    last_chunk_begin : int
        Where the last chunk of the previous call began; 0 at first.
    chunk_size, local_window, heavy_budget, sink_tokens : int
        S, L, H and K.
    dense_tail : int
        Number of last queries of the call that attend to every key before them; scores do not
        depend on it.
    gqa_reduce : {"sum", "max"}
        How the column sums of a group's query heads become one score.
    recall_block : int
        Rows that share a list of recalled keys; chunk_size is a multiple of it.

    Returns
    -------
    out : Tensor
        [B, Hq, Tq, Dv]; `out.transpose(1, 2)` is contiguous.
    scores : Tensor
        [B, Hkv, T_total].
    memory : Tensor
        int32 [B, Hkv, K + L + H]: the set that the last chunk attended to, -1 throughout if there
        was none. The set behind the last chunk is built when a next call asks for it.
    """
    return _ops.chunked_sparse_attention(
        q,
        k,
        v,
        scores,
        memory,
        recall_offsets,
        recall_positions,
        recall_visible_from,
        last_chunk_begin,
        chunk_size,
        local_window,
        heavy_budget,
        sink_tokens,
        dense_tail,
        gqa_reduce,
        recall_block,
        scale,
        sinks,
        softcap,
    )


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor | None,
    memory: Tensor | None,
    recall_offsets: Tensor | None,
    recall_positions: Tensor | None,
    recall_visible_from: Tensor | None,
    last_chunk_begin: int,
    layer: int,
    settings: str,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one layer's queries of a call, sparsely or densely as the settings say.

    Parameters
    ----------
    q, k, v, scores, memory, recall_offsets, recall_positions, recall_visible_from,
    last_chunk_begin, scale, sinks, softcap
        As for `chunked_sparse_attention`.
    layer : int
        The number of the layer.
    settings : str
        Settings of the whole model, as a text that `PrefillConfig.parse` reads.

    Returns
    -------
    out, scores, memory : Tensor
        As `chunked_sparse_attention` returns them. A dense call hands scores and memory on as they
        are, with score 0 for its own positions; so does `last_chunk_begin` stay.
    """
    return _ops.prefill_attention(
        q,
        k,
        v,
        scores,
        memory,
        recall_offsets,
        recall_positions,
        recall_visible_from,
        last_chunk_begin,
        layer,
        settings,
        scale,
        sinks,
        softcap,
    )


def prefill_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    scores: Tensor,
    memory: Tensor,
    position: Tensor,
    recall_offsets: Tensor | None,
    recall_positions: Tensor | None,
    recall_visible_from: Tensor | None,
    layer: int,
    settings: str,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend with one layer's queries of a call, and update its cache and state in place.

    For deployments: buffers are allocated once, and one graph prefills and decodes, under
    TorchScript, torch.compile, torch.export and AOTInductor. All layers of a model are called with
    the same `position`, which `advance_position_` then moves behind the call. A captured CUDA graph
    replays the position that it was captured with.

    Parameters
    ----------
    q, k, v : Tensor
        [B, Hq, T, D], [B, Hkv, T, D] and [B, Hkv, T, Dv] of the call's tokens alone.
    cache_key, cache_value : Tensor
        [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv]: k and v are written into them.
    scores : Tensor
        [B, Hkv, capacity], contiguous, 0 at first. A layer that is always dense needs none: [B,
        Hkv, 0].
    memory : Tensor
        int32 [B, Hkv, K + L + H or more], contiguous, -1 at first.
    position : Tensor
        int64 [2] on the CPU: the tokens before the call, and where the last sparse chunk began; 0
        and 0 at first.
    recall_offsets, recall_positions, recall_visible_from : Tensor, optional
        What `lexical_recall` returned for the call. A dense call ignores them.
    layer : int
        The number of the layer.
    settings : str
        Settings of the whole model, as a text that `PrefillConfig.parse` reads.

    Returns
    -------
    Tensor
        [B, Hq, T, Dv]; `out.transpose(1, 2)` is contiguous.
    """
    return _ops.prefill_attention_(
        q,
        k,
        v,
        cache_key,
        cache_value,
        scores,
        memory,
        position,
        recall_offsets,
        recall_positions,
        recall_visible_from,
        layer,
        settings,
        scale,
        sinks,
        softcap,
    )


def advance_position_(position: Tensor, num_tokens: int, settings: str) -> None:
    """Move a position of `prefill_attention_` behind a call of so many tokens.

    Parameters
    ----------
    position : Tensor
        int64 [2] on the CPU.
    num_tokens : int
        Tokens of the call.
    settings : str
        As `prefill_attention_` takes them.
    """
    _ops.advance_position_(position, num_tokens, settings)


def lexical_recall(
    token_ids: Tensor,
    begin: int,
    chunk_size: int,
    block: int,
    max_matches: int,
    max_suffix: int = 3,
    span: int = 2,
    max_count: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up earlier occurrences of the n-gram that ends at each new token.

    Strictly causal: what a row recalls depends on no token after it.

    Parameters
    ----------
    token_ids : Tensor
        int64 [B, T_total] on the CPU: all tokens of the prompt so far.
    begin : int
        First new token.
    chunk_size, block : int
        S, and the rows of a block; S is a multiple of it.
    max_matches : int
        Maximum number of occurrences recalled for a token, the latest first.
    max_suffix : int
        Length of the longest n-gram, in tokens, that is looked up; the longest one that occurs
        before the chunk counts.
    span : int
        Number of keys recalled from each occurrence on.
    max_count : int
        A single token is looked up only if it has occurred at most this often so far.

    Returns
    -------
    offsets : Tensor
        int32 [B * n_blocks + 1]: block i's entries are [offsets[i], offsets[i + 1]).
    positions, visible_from : Tensor
        int32 [nnz]: a position, and the first token that sees it; rising visible_from inside a
        block.
    """
    return _ops.lexical_recall(
        token_ids, begin, chunk_size, block, max_matches, max_suffix, span, max_count
    )


def recall_at_position(
    token_ids: Tensor, position: Tensor, num_tokens: int, settings: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Find what `lexical_recall` finds for one call of `prefill_attention_`.

    For graphs that prefill and decode: where the call is dense, the lists are empty.

    Parameters
    ----------
    token_ids : Tensor
        int64 [B, capacity] on the CPU: the prompt up to the end of the call. Later entries are
        ignored.
    position : Tensor
        As `prefill_attention_` takes it.
    num_tokens : int
        Tokens of the call.
    settings : str
        As `prefill_attention_` takes them.

    Returns
    -------
    offsets, positions, visible_from : Tensor
        As `lexical_recall` returns them.
    """
    return _ops.recall_at_position(token_ids, position, num_tokens, settings)


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
    diagonal_once: bool = False,
    normalize: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend linearly: the past of a token is one matrix, so time is linear in the tokens.

    S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i and out_i = scale phi(q_i) S_i, chunk by chunk. With the
    normaliser, z_i = exp(g_i) z_{i-1} + phi(k_i) and out_i = phi(q_i) S_i / (phi(q_i) . z_i), which
    is 0 where the divisor is 0. The normaliser's state travels beside the other: it comes out as
    the third result, and goes in together with `initial_state`. Differentiable once in all tensors;
    the gradient needs memory linear in T, since states are computed again.

    Parameters
    ----------
    q, k, v : Tensor
        [B, Hq, T, D], [B, Hkv, T, D] and [B, Hkv, T, Dv], any T. One token with a state is a
        decoding step.
    log_decay : Tensor, optional
        g <= 0, [Hkv] or [B, Hkv, T], of the dtype of the state; -inf forgets all that came before.
        None: 0. Values are checked on the CPU; on other devices the check would wait for the
        device, and values above 0 let the state grow without a bound.
    initial_state, initial_normalizer : Tensor, optional
        [B, Hkv, D, Dv] and [B, Hkv, D], float32 (float64 for float64 inputs): what the previous
        call returned. None: 0.
    feature_map : {"elu+1", "relu", "identity"}
        phi. "identity" takes inputs that are mapped already.
    chunk_size : int
        C. Time is O(T (C (D + Dv) + D Dv)); results differ by rounding alone. CPU kernels
        compute the outputs of 32 tokens together whatever it is, CUDA kernels those of 64 (of 32 in
        float32).
    causal : bool
        False: the sum of the forward and the backward direction, for encoders; no initial states.
        The backward direction is the forward one over the reversed sequence, decays included. The
        normaliser is the sum of both directions' too.
    diagonal_once : bool
        With causal=False: whether a token sees itself once instead of in both directions.
    normalize : bool
        Whether to divide by phi(q) . z.
    scale : float, optional
        Default 1. Cancels out where the output is normalised.

    Returns
    -------
    out : Tensor
        [B, Hq, T, Dv]; `out.transpose(1, 2)` is contiguous.
    state : Tensor
        [B, Hkv, D, Dv], behind the last token; of both directions, that of the forward one. Of
        16-bit inputs on CUDA it is a sum in float32 of features and decayed values that are rounded
        to their dtype.
    normalizer : Tensor
        [B, Hkv, D], or [B, Hkv, 0] without normalize.
    """
    return _ops.chunkwise_linear_attention(
        q,
        k,
        v,
        log_decay,
        initial_state,
        initial_normalizer,
        feature_map,
        chunk_size,
        causal,
        diagonal_once,
        normalize,
        scale,
    )


def chunkwise_linear_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    initial_normalizer: Tensor | None,
    grad_out: Tensor,
    grad_state: Tensor | None,
    grad_normalizer: Tensor | None,
    feature_map: str,
    chunk_size: int,
    causal: bool,
    diagonal_once: bool,
    normalize: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `chunkwise_linear_attention`: what its backward() calls.

    Parameters
    ----------
    q, k, v, log_decay, initial_state, initial_normalizer, feature_map, chunk_size, causal,
    diagonal_once, normalize, scale
        Those of the call.
    grad_out, grad_state, grad_normalizer : Tensor
        Gradients of the results; None: 0.

    Returns
    -------
    tuple of Tensor
        Gradients of q, k, v, log_decay, initial_state and initial_normalizer; empty where the
        argument is None.
    """
    return _ops.chunkwise_linear_attention_backward(
        q,
        k,
        v,
        log_decay,
        initial_state,
        initial_normalizer,
        grad_out,
        grad_state,
        grad_normalizer,
        feature_map,
        chunk_size,
        causal,
        diagonal_once,
        normalize,
        scale,
    )
