"""The operators, as documented Python functions over `torch.ops.h2o_prefill`.

Symbols: B batch, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), T tokens, D key dim, Dv value
dim; S chunk size, L local window, H heavy-hitter budget, K sink tokens, M memory size.

Tensors are float32, bfloat16, float16 or float64, all of one dtype and device, with any strides;
scores, column sums and `lse` (the natural logarithm of a softmax's denominator) are float32
(float64 for float64 inputs). Attention outputs are [B, Hq, T, Dv], and `out.transpose(1, 2)` is
contiguous. A wrong argument raises ValueError.

Arguments and results that several operators share:

- `q` [B, Hq, T, D] are the queries of a call. `k` and `v` are its keys and values, [B, Hkv, T, D]
  and [B, Hkv, T, Dv], or the whole history, [B, Hkv, T_total, ...], that ends with them.
- `scale` is the softmax scale, D ** -0.5 by default. `softcap` > 0 caps logits after scaling:
  softcap * tanh(z / softcap). `sinks` [Hq] add one logit to each query head's softmax, neither
  scaled nor capped, without a value; they are also in both softmaxes that scores are summed from.
- `out` is [B, Hq, T, Dv] and `lse` [B, Hq, T]; 0 and -inf in a row that sees no key. `colsum` is
  the attention that each key j received: the sum of exp(z_ij - lse_i) over queries i and the query
  heads of the group.
- `scores` [B, Hkv, T_total or less] and `memory` int32 [B, Hkv, any] (positions, ascending, then
  -1) are what the previous call of the prompt returned, None at first; missing scores are 0.
  `last_chunk_begin` is where the last chunk of that call began, 0 at first.
- `errors` float32 [B, Hkv, 4] is what `error_rows` measured so far, as the previous call returned
  it; 0 at first. For each head: how often its L and H have doubled, the sum of its errors in the
  chunks where they were measured, the number of these chunks, and the sum of the factors of L and H
  in them.
- `recall_offsets`, `recall_positions` and `recall_visible_from` are what `lexical_recall` returned
  for the call, on the CPU or the device of q; all or none. Block i of `PrefillConfig.recall_block`
  rows recalls the entries [offsets[i], offsets[i + 1]).
- `settings` are a text that `PrefillConfig.parse` reads or, except inside torch.compile and
  TorchScript, a `PrefillConfig`.

The operators are for inference: inputs that require gradients are refused while gradients are
enabled, except by `chunkwise_linear_attention`, which has a backward pass. Results are bitwise
independent of the number of threads, except where PyTorch's attention computes them:
`dense_attention` with few rows or in float64, and a dense tail of so few rows; and `linear` with
many tokens in bfloat16.
"""

# The functions below are signatures and docstrings; `_operator` calls the operator of that name.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _operator(function: _Function) -> _Function:
    """Return a function that calls the operator with the name and parameters of `function`."""
    operator = getattr(torch.ops.h2o_prefill, function.__name__)

    def text(x: Any) -> Any:
        return x.to_string() if isinstance(x, PrefillConfig) else x

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*map(text, args), **{name: text(x) for name, x in kwargs.items()})

    return call  # type: ignore[return-value]


@_operator
def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally inside every chunk of `chunk_size` tokens (phase 1).

    Takes keys and values of the call; returns out, lse and colsum [B, Hkv, T].
    """


@_operator
def memory_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with all queries to the listed keys of the history, without a mask (phase 2).

    `indices`, int32 [B, Hkv, M], are positions, then -1. Returns out, lse and colsum [B, Hkv, M],
    which is 0 at absent entries.
    """


@_operator
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend causally to the whole history: exact, without scores. Returns out.

    Without sinks and softcap this calls PyTorch's attention where that is faster: on the CPU for
    fewer than 64 rows of float32 where every query head has its own KV head, on CUDA for one row
    and for as many rows as keys, and for float64.
    """


@_operator
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend causally to the last `window` keys of each query, its own included: exact.

    The query at position p sees the keys of positions (p - window, p]. Keys and values are
    the whole history, or its end alone, as a cache that keeps the window holds it; the last key
    belongs to the last query. A window, at least 1, that is longer than the history is full
    attention. Time is linear in the tokens: on the CPU no key outside of a window is multiplied,
    but for the edges of blocks. Returns out, and lse with the sinks.
    """


@_operator
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge out and lse over disjoint key sets, as if one softmax had run over both.

    A row with lse -inf contributes nothing; the result is 0 and -inf where both sides are empty.
    """


@_operator
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

    It holds the first K positions, the last L before chunk_end, and the H other candidates with the
    highest scores; of equal scores the lower position wins. Candidates are the last chunk,
    [chunk_begin, chunk_end), and `memory`, the set that it attended to. Returns int32
    [B, Hkv, K + L + H], ascending, then -1.
    """


@_operator
def accumulate_scores_(scores: Tensor, memory: Tensor, colsum: Tensor) -> None:
    """Add column sums [B, Hkv, M] to the scores [B, Hkv, T] of memory sets, in place.

    `memory`, int32 [B, Hkv, M], contains strictly ascending positions, then -1; column sums of
    absent entries are ignored.
    """


@_operator
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Copy rows of every head: from x [B, H, T, D], by int32 [B, H, M], to [B, H, M, D].

    An index of -1 gives a row of zeros.
    """


@_operator
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
    settings: PrefillConfig | str,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    errors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the whole sparse prefill of one layer, for calls of any length.

    Takes keys and values of the history, and the state of the prompt before the call. Of the
    settings of the layer (`PrefillConfig.of_layer`), fields that choose sparse calls and layers
    have no effect.

    Returns
    -------
    out : Tensor
        [B, Hq, T, Dv].
    scores : Tensor
        [B, Hkv, T_total].
    memory : Tensor
        int32 [B, Hkv, `PrefillConfig.memory_size`]: the set that the last chunk attended to, -1
        throughout if there was none. The set after the last chunk is built when the next call needs
        it.
    errors : Tensor
        float32 [B, Hkv, 4].
    """


@_operator
def prefill_attention_(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_key: Tensor,
    cache_value: Tensor,
    scores: Tensor,
    memory: Tensor,
    errors: Tensor | None,
    position: Tensor,
    layer: int,
    settings: PrefillConfig | str,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    recall_offsets: Tensor | None = None,
    recall_positions: Tensor | None = None,
    recall_visible_from: Tensor | None = None,
    window: int | None = None,
    checkpoint_memory: Tensor | None = None,
    checkpoint_scores: Tensor | None = None,
    checkpoint_errors: Tensor | None = None,
) -> Tensor:
    """Attend with one layer's queries of a call, and update its cache and state in place.

    For deployments: buffers are allocated once, and one graph prefills and decodes, under
    TorchScript, torch.compile, torch.export and AOTInductor. All layers of a model are called with
    the same `position`, which `advance_position_` then moves past the call. A captured CUDA graph
    replays the position that it was captured with. Returns out.

    Parameters
    ----------
    k, v : Tensor, optional
        Of the call's tokens alone. None: the caches contain them already.
    cache_key, cache_value : Tensor
        [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv]: k and v are written into them.
    scores : Tensor
        [B, Hkv, capacity], contiguous, 0 at first; [B, Hkv, 0] for a layer that is always dense.
    memory : Tensor
        int32 [B, Hkv, `PrefillConfig.memory_size` of the layer or more], contiguous, -1 at first.
    errors : Tensor, optional
        Contiguous; needed where the settings have `error_rows`.
    position : Tensor
        int64 [2] on the CPU: the number of tokens before the call, and where the last sparse chunk
        began; both 0 at first.
    layer, settings
        Index of the layer, and settings of the whole model.
    recall_offsets, recall_positions, recall_visible_from : Tensor, optional
        What `recall_at_position` returned for the call. A dense call ignores them.
    window : int, optional
        Of a layer with a sliding window, at least 1: calls whose history is longer are exact, as
        `sliding_window_attention` computes them.
    checkpoint_memory, checkpoint_scores, checkpoint_errors : Tensor, optional
        int32 and float32 [C, B, Hkv, `PrefillConfig.memory_size` of the layer] and float32
        [C, B, Hkv, 4], with C = T // S, contiguous, written by a sparse call: what the next chunk
        needs after each S tokens of the call (`LayerState.checkpoint`).
    """


@_operator
def advance_position_(position: Tensor, num_tokens: int, settings: PrefillConfig | str) -> None:
    """Move a position of `prefill_attention_`, int64 [2], past a call of `num_tokens` tokens."""


@_operator
def pack_linear(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Pack the weight [outputs, even inputs] of a linear layer for `linear` and `packed_embedding`.

    `format` is "bfloat16", "float16" or "int8", rounded to multiples of a scale for each output,
    its largest magnitude / 127. Returns packed, [ceil(outputs / 16), inputs, 16] of that dtype, the
    same for all CPUs, and scales, float32 [outputs] of int8, else [0]. Panels of 16 outputs, the
    last filled up with zeros, are [inputs, 16]; of bfloat16 [inputs / 2, 16, 2].
    """


@_operator
def linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Apply a linear layer with packed weights: x [..., inputs] to [..., outputs].

    Products of weights, `x` and `bias` [outputs] are added in float32 (float64 if x is), and the
    result has the dtype of x. Up to 6 tokens take the time of reading the weights. PyTorch's
    `linear` multiplies 256 tokens or more in bfloat16 where the CPU has such products, after
    weights of int8, multiplied by their scales, are rounded to bfloat16.
    """


@_operator
def packed_embedding(ids: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """Return rows of a packed weight, float32 [..., inputs], of ids int64 [...] below `outputs`."""


@_operator
def lexical_recall(
    token_ids: Tensor, begin: int, settings: PrefillConfig | str, token_text: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up earlier matches of the n-gram that ends at each new token, and of its characters.

    Strictly causal: what a row recalls depends on no token after it. The longest n-gram with a
    match before the chunk is used, the latest matches first.

    Parameters
    ----------
    token_ids : Tensor
        int64 [B, T_total] on the CPU: all tokens of the prompt so far.
    begin : int
        First new token.
    token_text : Tensor, optional
        int32 [vocabulary, any] on the CPU: the characters of each token, then 0, as
        `h2o_prefill.vocabulary.token_text` makes it. With `recall_characters`, the last characters
        up to the end of each token are looked up as well, across tokens; those after a match are
        recalled.

    Returns
    -------
    offsets : Tensor
        int32 [B * n_blocks + 1].
    positions, visible_from : Tensor
        int32 [nnz]: a position, and the first token that sees it; visible_from rises within a
        block.
    """


@_operator
def recall_at_position(
    token_ids: Tensor,
    position: Tensor,
    num_tokens: int,
    settings: PrefillConfig | str,
    token_text: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `lexical_recall` for a call of `prefill_attention_` of `num_tokens` tokens.

    For graphs that prefill and decode: if the call is dense, the lists are empty. `token_ids`,
    int64 [B, capacity] on the CPU, have the prompt up to the end of the call, and then anything.
    """


@_operator
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
    """Attend linearly: the past of a token is one matrix, so time is linear in the tokens.

    S_i = exp(g_i) S_{i-1} + phi(k_i)^T v_i and out_i = scale phi(q_i) S_i, chunk by chunk. With the
    normalizer, z_i = exp(g_i) z_{i-1} + phi(k_i) and out_i = phi(q_i) S_i / (phi(q_i) . z_i), which
    is 0 where the divisor is 0. Differentiable once in all tensors; the backward pass recomputes
    states, so its memory is linear in T. Returns out, and the state and the normalizer after the
    last token, of the forward direction; a normalizer [B, Hkv, 0] without `normalize`.

    Parameters
    ----------
    q, k, v : Tensor
        [B, Hq, T, D], [B, Hkv, T, D] and [B, Hkv, T, Dv], any T. One token with a state is a
        decoding step.
    log_decay : Tensor, optional
        g <= 0, [Hkv] or [B, Hkv, T], in the dtype of the state; -inf resets the state. None: 0.
        Values are checked on the CPU only; elsewhere, values above 0 let the state grow without
        bound.
    initial_state, initial_normalizer : Tensor, optional
        [B, Hkv, D, Dv] and, with normalize, [B, Hkv, D], as the previous call returned them; in
        float32 (float64 for float64 inputs). None: 0.
    feature_map : {"elu+1", "relu", "identity"}
        phi. "identity" takes inputs that are already mapped.
    chunk_size : int
        C. Time is O(T (C (D + Dv) + D Dv)); results differ by rounding alone. CPU kernels always
        compute 32 tokens together.
    causal : bool
        False: the sum of the forward direction and of the same over the reversed sequence, decays
        and normalizer included, for encoders: a token sees itself twice; no initial states.
    normalize : bool
        Whether to divide by phi(q) . z.
    scale : float, optional
        Default 1; without effect with normalize.
    """
