"""Linear attention as a function with any feature map, and as a module with its projections."""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from h2o_prefill import ops


class LinearAttentionState(NamedTuple):
    """What one call of a sequence passes to the next, in float32 (float64 for float64 inputs)."""

    state: Tensor  # [B, Hkv, D, Dv]
    normalizer: Tensor  # [B, Hkv, D]; [B, Hkv, 0] without one


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial: LinearAttentionState | None = None,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu+1",
    chunk_size: int = 64,
    causal: bool = True,
    normalize: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, LinearAttentionState]:
    """Attend linearly with any feature map.

    Parameters
    ----------
    q, k, v, log_decay, chunk_size, causal, normalize, scale
        As `ops.chunkwise_linear_attention` takes them.
    initial : LinearAttentionState, optional
        What the previous call of the sequence returned.
    feature_map : str or callable
        A name that the operator accepts, or a function that is applied to q and to k and may change
        their last dimension.

    Returns
    -------
    out, state : Tensor, LinearAttentionState
        Output [B, Hq, T, Dv], and the state after the last token.

    Notes
    -----
    With `feature_map="identity"` this is the core, between projections and norms, of:

    - Retention (RetNet): `log_decay` [H] is log(gamma), `scale` is D ** -0.5.
    - Lightning attention (MiniMax): q, k and v after their activation; `log_decay` [H] is minus the
      slopes. The state is the one that its cache stores.
    - Mamba-2: q is C, k is B, v is x dt, and `log_decay` [B, H, T] is A dt. The state is
      Mamba-2's, transposed; add D x afterwards. Use `expand` for the B and C that heads of a group
      share, and move several groups into the batch.
    """
    if not isinstance(feature_map, str):
        q, k, feature_map = feature_map(q), feature_map(k), "identity"
    before, divisor = (None, None) if initial is None else initial
    options = feature_map, chunk_size, causal, normalize, scale
    out, state, normalizer = ops.chunkwise_linear_attention(
        q, k, v, log_decay, before, divisor if normalize else None, *options
    )
    return out, LinearAttentionState(state, normalizer)


class ChunkwiseLinearAttention(nn.Module):
    """A linear attention layer with its projections, to replace a softmax attention layer.

    The module holds weights and no state: the state of a sequence is passed in and returned as
    tensors, so one token with a state is a decoding step. It can be trained and scripted.

    Parameters
    ----------
    hidden_size : int
        Width of the input and of the output.
    num_heads : int
        Query heads; the head dim is hidden_size / num_heads.
    num_kv_heads : int, optional
        KV heads; must divide num_heads. Default: num_heads.
    feature_map : {"elu+1", "relu", "identity"}
        Applied to queries and keys.
    log_decay : Tensor, optional
        [num_kv_heads], <= 0; becomes a buffer. Default: no decay.
    chunk_size, causal, normalize
        As `ops.chunkwise_linear_attention` takes them.
    bias : bool
        Whether the projections have a bias.

    Raises
    ------
    ValueError
        If num_heads does not divide hidden_size, or num_kv_heads does not divide num_heads.

    Example
    -------
    >>> attention = ChunkwiseLinearAttention(512, 8)
    >>> out, state, normalizer = attention(hidden)
    >>> out, state, normalizer = attention(next_token, state, normalizer)
    """

    log_decay: Optional[Tensor]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: Optional[int] = None,
        feature_map: str = "elu+1",
        log_decay: Optional[Tensor] = None,
        chunk_size: int = 64,
        causal: bool = True,
        normalize: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"num_heads must divide hidden_size ({hidden_size}), got {num_heads}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads ({num_heads}), got {kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.feature_map = feature_map
        self.chunk_size = chunk_size
        self.causal = causal
        self.normalize = normalize
        kv_size = hidden_size // num_heads * kv_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias)
        self.register_buffer("log_decay", log_decay)

    def forward(
        self,
        hidden: Tensor,
        initial_state: Optional[Tensor] = None,
        initial_normalizer: Optional[Tensor] = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend with the tokens of one call.

        Takes [B, T, hidden_size] and, but in the first call of a sequence, what the one before
        returned. Returns the output [B, T, hidden_size], the state [B, Hkv, D, D] and the
        normalizer [B, Hkv, D or 0].
        """
        q = self.q_proj(hidden).unflatten(2, [self.num_heads, -1]).transpose(1, 2)
        k = self.k_proj(hidden).unflatten(2, [self.num_kv_heads, -1]).transpose(1, 2)
        v = self.v_proj(hidden).unflatten(2, [self.num_kv_heads, -1]).transpose(1, 2)
        out, state, normalizer = torch.ops.h2o_prefill.chunkwise_linear_attention(
            q,
            k,
            v,
            self.log_decay,
            initial_state,
            initial_normalizer if self.normalize else None,
            self.feature_map,
            self.chunk_size,
            self.causal,
            self.normalize,
            None,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), state, normalizer
