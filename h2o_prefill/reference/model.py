"""A whole decoder that prefills in chunks.

Each layer takes all new tokens and works through their chunks in order, then the next layer does.
The result is the same as taking each chunk through all layers, since a layer needs only its own
state from earlier chunks.

The parameters have the names of Hugging Face's Llama, so its state dict loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.reference import ops
from h2o_prefill.reference.attention import apply_rope_global, populate_kv_cache, rope_frequencies
from h2o_prefill.reference.recall import Settings, read_settings


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


@dataclass
class Prompt:
    """The state of one prompt: its KV cache, and scores and memory sets by layer."""

    cache: Tensor  # [num_layers, 2, Hkv, max_seq_len, D]: keys after RoPE, and values
    length: int = 0
    # By layer: scores [1, Hkv, tokens], memory set [1, Hkv, M], errors [1, Hkv, 4].
    state: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    last_chunk_begin: int = 0
    token_ids: list[int] = field(default_factory=list)
    recalled: tuple[Any, Any, Any] = ops.NO_RECALL  # lists of the last call


class ChunkedSparseAttentionLayer(nn.Module):
    """A transformer layer: norm, chunked sparse attention, residual; norm, SwiGLU, residual."""

    def __init__(self, config: TransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.self_attn = _projections(
            q_proj=(hidden, query),
            k_proj=(hidden, key),
            v_proj=(hidden, key),
            o_proj=(query, hidden),
        )
        self.mlp = _projections(
            gate_proj=(hidden, inner), up_proj=(hidden, inner), down_proj=(inner, hidden)
        )
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, prompt: Prompt, settings: Settings | None = None) -> Tensor:
        """Run the layer over the new tokens of a call, hidden [num_tokens, hidden_size].

        Without settings they attend densely to the whole cache, as in decode.
        """
        normed = self.input_layernorm(hidden)
        q, k, v = (
            self.self_attn[name](normed).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        attended = self._attend(q, k, v, prompt, settings).transpose(0, 1).flatten(1)
        hidden = hidden + self.self_attn["o_proj"](attended)
        normed = self.post_attention_layernorm(hidden)
        gate = nn.functional.silu(self.mlp["gate_proj"](normed))
        return hidden + self.mlp["down_proj"](gate * self.mlp["up_proj"](normed))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, prompt: Prompt, settings: Settings | None
    ) -> Tensor:
        """Return the output [Hq, num_tokens, D] of q, k and v [heads, num_tokens, D]."""
        layer, past = self.layer_idx, prompt.length
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_theta)
        q, k = apply_rope_global(q, k, 0, q.shape[1], frequencies, begin=past)
        populate_kv_cache(prompt.cache[layer], k, v, 0, k.shape[1], begin=past)
        keys, values = prompt.cache[layer, :, None, :, : past + k.shape[1]]
        config = None if settings is None else read_settings(settings).of_layer(layer)
        if config is None or config.exact or layer in config.dense_layers:
            return ops.dense_attention(q[None], keys, values)[0]
        scores, memory, errors = prompt.state.get(layer, (None, None, None))
        out, *state = ops.chunked_sparse_attention(
            *(q[None], keys, values, scores, memory, *prompt.recalled),
            prompt.last_chunk_begin,
            config,
            errors=errors,
        )
        prompt.state[layer] = (state[0], state[1], state[2])
        return out[0]


def _projections(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class ChunkedSparseTransformer(nn.Module):
    """Full transformer with chunked sparse prefill: embedding, layers, norm, head.

    It has no state of a prompt: the caller passes a `Prompt`.
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

    def new_prompt(self, max_seq_len: int) -> Prompt:
        """Return the empty state of a prompt of at most `max_seq_len` tokens."""
        sizes = self.config
        shape = (sizes.num_layers, 2, sizes.num_kv_heads, max_seq_len, sizes.head_dim)
        return Prompt(self.embed_tokens.weight.new_zeros(shape))

    def forward(
        self, input_ids: Tensor, prompt: Prompt, settings: Settings | None = None
    ) -> Tensor:
        """Return the logits [num_tokens, vocab_size] of new tokens, int64 [num_tokens].

        With settings the call is a sparse prefill; without, it is dense over the whole cache.
        """
        hidden = self.embed_tokens(input_ids)
        prompt.token_ids += input_ids.tolist()
        prompt.recalled = ops.NO_RECALL
        if settings is not None and read_settings(settings).recall > 0:
            every = torch.tensor([prompt.token_ids])
            prompt.recalled = ops.lexical_recall(every, prompt.length, settings)
        for layer in self.layers:
            hidden = layer(hidden, prompt, settings)
        if settings is not None and len(input_ids):
            size = read_settings(settings).chunk_size
            prompt.last_chunk_begin = prompt.length + (len(input_ids) - 1) // size * size
        prompt.length += len(input_ids)
        return self.lm_head(self.norm(hidden))


@torch.no_grad()
def chunked_prefill(
    model: ChunkedSparseTransformer, input_ids: Tensor, settings: Settings = "h2o"
) -> Tensor:
    """Prefill one prompt sparsely, int64 [N] or [1, N], from fresh state; return its logits."""
    if input_ids.dim() not in (1, 2) or (input_ids.dim() == 2 and input_ids.shape[0] != 1):
        raise ValueError(f"input_ids must be [N] or [1, N], got {list(input_ids.shape)}")
    tokens = input_ids.flatten()
    logits = model(tokens, model.new_prompt(len(tokens)), settings)
    return logits.reshape(*input_ids.shape, logits.shape[-1])
