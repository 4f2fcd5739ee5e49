"""Layers of transformers that compute the recurrence of `chunkwise_linear_attention`."""

import pytest
import torch
from hf_helpers import assert_close
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.minimax import modeling_minimax as minimax

from h2o_prefill import ops

# Sizes of a Mamba-2 layer: rows, heads, values of a head and of its state's other side.
BATCH, HEADS, DIM, STATE = 2, 4, 8, 16


class LinearCache:
    """What lightning attention asks of a cache."""

    state = None
    get_linear_cache = lambda self, _: self.state  # noqa: E731
    set_linear_cache = lambda self, _, state: setattr(self, "state", state)  # noqa: E731


def test_lightning_attention_is_the_operator():
    """In blocks of 8 tokens, the last one shorter; then tokens with a state, one and several."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "block_size": 8}
    torch.manual_seed(0)
    layer = minimax.MiniMaxLightningAttention(minimax.MiniMaxConfig(**sizes), layer_idx=2).eval()
    cache, state, seen = LinearCache(), None, []
    layer.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for length in (45, 1, 5):
        hidden = torch.randn(2, length, 32)
        layer(hidden, None, None, past_key_values=cache)
        qkv = layer.act_fn(layer.qkv_proj(hidden)).unflatten(2, (4, -1)).transpose(1, 2)
        decay = -layer.slope_rate.flatten()
        out, state, _ = ops.chunkwise_linear_attention(
            *qkv.split(16, 3), decay, state, feature_map="identity"
        )
        assert_close(out.transpose(1, 2).flatten(2), seen[-1])
        assert_close(state, cache.state)


def scan_like_mamba(x, dt, a, b, c, states):
    """The operator with what Mamba-2 scans: x [B, T, H, P], dt [B, T, H], a [H], b, c [B, T, G, N].

    The heads of a group share keys and queries, so groups become a part of the batch, and the heads
    of a group see the same tensor.
    """
    batch, groups = b.shape[0], b.shape[2]

    def by_group(t):
        """[B, T, H, *] as [B * G, H / G, T, *]."""
        return t.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1).transpose(1, 2)

    v = by_group(x * dt.unsqueeze(3))
    log_decay = by_group((a * dt).unsqueeze(3)).squeeze(3)
    k, q = (by_group(t).expand(-1, v.shape[1], -1, -1) for t in (b, c))
    # [B, H, P, N]
    states = states.unflatten(1, (groups, -1)).flatten(0, 1).transpose(2, 3).contiguous()
    out, states, _ = ops.chunkwise_linear_attention(
        q, k, v, log_decay, states, feature_map="identity"
    )
    out = out.unflatten(0, (batch, groups)).flatten(1, 2).transpose(1, 2)
    return out, states.transpose(2, 3).unflatten(0, (batch, groups)).flatten(1, 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_scan_of_mamba_2_is_the_operator(groups):
    torch.manual_seed(0)
    states = torch.randn(BATCH, HEADS, DIM, STATE)
    for length in (37, 1):
        x = torch.randn(BATCH, length, HEADS, DIM)
        b, c = torch.randn(2, BATCH, length, groups, STATE)
        dt = torch.nn.functional.softplus(torch.randn(BATCH, length, HEADS))
        a = -torch.rand(HEADS) * 4
        out, after = scan_like_mamba(x, dt, a, b, c, states)
        expected, states = mamba2_chunk_scan(
            x, dt, a, b, c, chunk_size=16, initial_states=states, return_final_states=True
        )
        assert_close(out, expected)
        assert_close(after, states)
