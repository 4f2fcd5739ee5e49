"""Task 6 of the method: a whole decoder that prefills in chunks.

Each layer takes all new tokens and works through their chunks in order, then the next layer does.
That gives the same result as taking each chunk through all layers, for a chunk needs of a layer
only what the same layer kept of the chunks before.

The parameters have the names of Hugging Face's Llama, so its state dict loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from h2o_prefill.reference.data_structures import ChunkedKVCache, ChunkManager, MemorySetTracker
from h2o_prefill.reference.fusion import fused_chunk_attention
from h2o_prefill.reference.intra_chunk import (
    apply_rope_global,
    causal_mask,
    intra_chunk_attention,
    populate_kv_cache,
    rope_frequencies,
)
from h2o_prefill.reference.memory_selection import gather_memory_kv


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a decoder. The defaults make a tiny one."""

    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )


class ChunkedSparseAttentionLayer(nn.Module):
    """Single transformer layer with chunked sparse attention.

    Norm, attention, residual; norm, SwiGLU MLP, residual.

    Parameters
    ----------
    config : TransformerConfig
    layer_idx : int
        Which part of cache and tracker is this layer's.
    """

    def __init__(self, config: TransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        hidden, head = config.hidden_size, config.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, config.num_heads * head, bias=False),
                "k_proj": nn.Linear(hidden, config.num_kv_heads * head, bias=False),
                "v_proj": nn.Linear(hidden, config.num_kv_heads * head, bias=False),
                "o_proj": nn.Linear(config.num_heads * head, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, hidden, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        chunks: ChunkManager,
        cache: ChunkedKVCache,
        tracker: MemorySetTracker | None,
    ) -> Tensor:
        """Run the layer over the new tokens of a call.

        Parameters
        ----------
        hidden : Tensor
            [num_tokens, hidden_size].
        chunks : ChunkManager
            The call's chunks.
        cache : ChunkedKVCache
            Gets the keys and values of the new tokens.
        tracker : MemorySetTracker, optional
            Gets their scores. Without one the new tokens attend densely to the whole cache, as in
            decode.

        Returns
        -------
        Tensor
            [num_tokens, hidden_size].
        """
        normed = self.input_layernorm(hidden)
        q, k, v = (self._heads(name, normed) for name in ("q_proj", "k_proj", "v_proj"))
        parts = [
            self._attend(c, q, k, v, chunks, cache, tracker) for c in range(chunks.num_chunks())
        ]  # each [Hq, s, D]
        attended = torch.cat([q[:, :0], *parts], dim=1).transpose(0, 1).flatten(1)
        hidden = hidden + self.self_attn["o_proj"](attended)
        normed = self.post_attention_layernorm(hidden)
        gate = nn.functional.silu(self.mlp["gate_proj"](normed))
        return hidden + self.mlp["down_proj"](gate * self.mlp["up_proj"](normed))

    def _heads(self, name: str, hidden: Tensor) -> Tensor:
        """Project to [heads, num_tokens, head_dim]."""
        return (
            self.self_attn[name](hidden).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
        )

    def _attend(
        self,
        chunk_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunks: ChunkManager,
        cache: ChunkedKVCache,
        tracker: MemorySetTracker | None,
    ) -> Tensor:
        """Return the attention output of one chunk, [num_heads, s, head_dim]."""
        start, end = chunks.begin(chunk_idx), chunks.end(chunk_idx)
        rows = slice(start - chunks.past, end - chunks.past)
        place = {"chunk_idx": chunk_idx, "chunk_size": chunks.chunk_size, "begin": chunks.past}
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_theta)
        q, k = apply_rope_global(q[:, rows], k[:, rows], rope_freqs=frequencies, **place)
        v = v[:, rows]
        layer_cache = cache.layer(self.layer_idx)
        populate_kv_cache(layer_cache, k, v, **place)

        # The G query heads that share a KV head are G times as many queries of that head:
        # [Hkv, G s, D]. Summing a column then sums over the group too, as its score asks for.
        group = self.config.num_heads // self.config.num_kv_heads
        queries = q.reshape(self.config.num_kv_heads, -1, self.config.head_dim)
        if tracker is None:
            keys, values = layer_cache[0, :, :end], layer_cache[1, :, :end]
            mask = causal_mask(end - start, end).repeat(group, 1)
            output, _ = intra_chunk_attention(queries, keys, values, mask)
            return output.reshape(q.shape)

        mask = causal_mask(end - start).repeat(group, 1)
        memory = tracker.begin_chunk(self.layer_idx, start)
        if memory is None:
            output, intra_weights = intra_chunk_attention(queries, k, v, mask)
        else:
            k_mem, v_mem = gather_memory_kv(layer_cache[None], memory[None])
            output, inter_weights, intra_weights = fused_chunk_attention(
                queries, k, v, k_mem[0], v_mem[0], mask, memory_mask=memory >= 0
            )
            tracker.scores.accumulate_scores(self.layer_idx, memory, inter_weights)
        tracker.scores.set_initial_scores(self.layer_idx, start, end, intra_weights)
        return output.reshape(q.shape)


class ChunkedSparseTransformer(nn.Module):
    """Full transformer with chunked sparse prefill: embedding, layers, norm, head.

    It holds no state of a prompt: cache and tracker are the caller's.

    Parameters
    ----------
    config : TransformerConfig
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ChunkedSparseAttentionLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_cache(self, max_seq_len: int) -> ChunkedKVCache:
        """Return an empty cache for a prompt of at most `max_seq_len` tokens."""
        weight, config = self.embed_tokens.weight, self.config
        return ChunkedKVCache(
            config.num_layers,
            config.num_kv_heads,
            max_seq_len,
            config.head_dim,
            weight.dtype,
            weight.device,
        )

    def new_tracker(
        self, max_seq_len: int, local_window: int, heavy_budget: int, sink_tokens: int = 0
    ) -> MemorySetTracker:
        """Return an empty tracker for a prompt of at most `max_seq_len` tokens."""
        weight, config = self.embed_tokens.weight, self.config
        return MemorySetTracker(
            config.num_layers,
            config.num_kv_heads,
            max_seq_len,
            local_window,
            heavy_budget,
            sink_tokens,
            weight.dtype,
            weight.device,
        )

    def forward(
        self,
        input_ids: Tensor,
        cache: ChunkedKVCache,
        tracker: MemorySetTracker | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Run new tokens of a prompt.

        Parameters
        ----------
        input_ids : Tensor
            int64 [num_tokens], the tokens after those in the cache.
        cache : ChunkedKVCache
            Grows by the new tokens.
        tracker : MemorySetTracker, optional
            With one the call is a sparse prefill; without, it is dense over the whole cache
            (decode).
        chunk_size : int, optional
            S. Default: all new tokens are one chunk.

        Returns
        -------
        Tensor
            Logits [num_tokens, vocab_size].
        """
        num_tokens = input_ids.shape[0]
        size = max(num_tokens, 1) if chunk_size is None else chunk_size
        chunks = ChunkManager(cache.length, num_tokens, size)
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, chunks, cache, tracker)
        cache.length += num_tokens
        return self.lm_head(self.norm(hidden))


@torch.no_grad()
def chunked_prefill(
    model: ChunkedSparseTransformer,
    input_ids: Tensor,
    chunk_size: int = 1024,
    local_window: int = 256,
    heavy_budget: int = 256,
    sink_tokens: int = 0,
) -> Tensor:
    """Prefill one prompt sparsely, from fresh state.

    Parameters
    ----------
    model : ChunkedSparseTransformer
    input_ids : Tensor
        int64 [N] or [1, N].
    chunk_size, local_window, heavy_budget, sink_tokens : int
        S, L, H and K.

    Returns
    -------
    Tensor
        Logits [N, vocab_size] or [1, N, vocab_size].

    Raises
    ------
    ValueError
        If `input_ids` holds more than one prompt, or a size is out of range.
    """
    if input_ids.dim() not in (1, 2) or (input_ids.dim() == 2 and input_ids.shape[0] != 1):
        raise ValueError(f"input_ids must be [N] or [1, N], got {list(input_ids.shape)}")
    prompt = input_ids.flatten()
    num_tokens = prompt.shape[0]
    cache = model.new_cache(num_tokens)
    tracker = model.new_tracker(num_tokens, local_window, heavy_budget, sink_tokens)
    logits = model(prompt, cache, tracker, chunk_size)
    return logits if input_ids.dim() == 1 else logits.unsqueeze(0)
