"""Layers of transformers that compute the recurrence of `chunkwise_linear_attention`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from h2o_prefill import ops

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Sizes of a Mamba-2 layer: rows, heads, values of a head and of its state's other side.
BATCH, HEADS, DIM, STATE = 2, 4, 8, 16


class LinearCache:
    """What lightning attention asks of a cache."""

    state: torch.Tensor | None = None

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.state

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.state = state


@pytest.fixture
def minimax() -> Any:
    """The module of MiniMax's model."""
    return pytest.importorskip("transformers.models.minimax.modeling_minimax")


@pytest.fixture
def config(minimax: Any) -> Any:
    """A small MiniMax with blocks of 8 tokens, two of its layers lightning attention."""
    return minimax.MiniMaxConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        initializer_range=0.2,
    )


@pytest.fixture
def lightning(minimax: Any, config: Any) -> Any:
    """A random layer of lightning attention, and what it gave before its norm and gate."""
    torch.manual_seed(0)
    layer = minimax.MiniMaxLightningAttention(config, layer_idx=2).eval()
    layer.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    seen: list[torch.Tensor] = []
    return layer, seen


def attend_like_lightning(
    layer: Any, hidden: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator with the queries, keys, values and decays of such a layer."""
    qkv = layer.act_fn(layer.qkv_proj(hidden)).unflatten(2, (layer.num_attention_heads, -1))
    q, k, v = (x.transpose(1, 2) for x in qkv.split(layer.head_dim, 3))
    out, state, _ = ops.chunkwise_linear_attention(
        q, k, v, -layer.slope_rate.flatten(), state, feature_map="identity"
    )
    return out.transpose(1, 2).flatten(2), state


def test_lightning_attention_is_the_operator(lightning: Any) -> None:
    layer, seen = lightning
    cache = LinearCache()
    state = None
    # Blocks of 8 tokens, the last one shorter; then tokens with a state, one and several.
    for length in (45, 1, 1, 5):
        hidden = torch.randn(2, length, 32)
        layer(hidden, None, None, past_key_values=cache)
        out, state = attend_like_lightning(layer, hidden, state)
        torch.testing.assert_close(out, seen[-1], **CLOSE)
        torch.testing.assert_close(state, cache.state, **CLOSE)


def test_lightning_attention_has_the_gradient_of_the_operator(lightning: Any) -> None:
    layer, seen = lightning
    hidden = torch.randn(2, 45, 32)
    weights = torch.randn(2, 45, 64)
    with torch.enable_grad():
        layer(hidden, None, None)
        expected, actual = (
            torch.autograd.grad((out * weights).sum(), layer.qkv_proj.weight)[0]
            for out in (seen[-1], attend_like_lightning(layer, hidden, None)[0])
        )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_the_operator_in_its_layers_generates_the_same(
    minimax: Any, config: Any
) -> None:
    class Attention(minimax.MiniMaxLightningAttention):
        def forward(self, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
            cache = given["past_key_values"]
            out, state = attend_like_lightning(
                self, hidden_states, cache.get_linear_cache(self.layer_idx)
            )
            cache.set_linear_cache(self.layer_idx, state)
            gate = torch.sigmoid(self.output_gate(hidden_states))
            return self.out_proj(gate * self.norm(out)), state

    torch.manual_seed(0)
    model = minimax.MiniMaxForCausalLM(config).eval()
    ids = torch.randint(3, 61, (1, 30))
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, **options, output_logits=True)
    for number in (0, 2):
        theirs = model.model.layers[number].self_attn
        ours = Attention(config, number)
        ours.load_state_dict(theirs.state_dict())
        model.model.layers[number].self_attn = ours
    actual = model.generate(ids, **options, output_logits=True)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)


def scan_like_mamba(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator with what Mamba-2 scans: x [B, T, H, P], dt [B, T, H], a [H], b, c [B, T, G, N].

    The heads of a group share keys and queries, so groups become a part of the batch, and the heads
    of a group see the same tensor.
    """
    batch, groups = b.shape[0], b.shape[2]

    def by_group(t: torch.Tensor) -> torch.Tensor:
        """[B, T, H, *] as [B * G, H / G, T, *]."""
        return t.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1).transpose(1, 2)

    v = by_group(x * dt.unsqueeze(3))
    log_decay = by_group((a * dt).unsqueeze(3)).squeeze(3)
    k, q = (by_group(t).expand(-1, v.shape[1], -1, -1) for t in (b, c))
    if states is not None:  # [B, H, P, N]
        states = states.unflatten(1, (groups, -1)).flatten(0, 1).transpose(2, 3).contiguous()
    out, states, _ = ops.chunkwise_linear_attention(
        q, k, v, log_decay, states, feature_map="identity"
    )
    out = out.unflatten(0, (batch, groups)).flatten(1, 2).transpose(1, 2)
    return out, states.transpose(2, 3).unflatten(0, (batch, groups)).flatten(1, 2)


def mamba_2_function(name: str) -> Any:
    """Return a function of transformers' Mamba-2, or skip the test."""
    mamba2: Any = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(mamba2, name):
        pytest.skip(f"this transformers has no {name}")
    return getattr(mamba2, name)


def random_scan(length: int, groups: int) -> list[torch.Tensor]:
    """Return x, dt, a, b and c of `scan_like_mamba`."""
    x = torch.randn(BATCH, length, HEADS, DIM)
    b, c = torch.randn(2, BATCH, length, groups, STATE)
    dt = F.softplus(torch.randn(BATCH, length, HEADS))
    return [x, dt, -torch.rand(HEADS) * 4, b, c]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_scan_of_mamba_2_is_the_operator(groups: int) -> None:
    scan = mamba_2_function("mamba2_chunk_scan")
    torch.manual_seed(0)
    states = torch.randn(BATCH, HEADS, DIM, STATE)
    for length in (37, 1):
        x, dt, a, b, c = random_scan(length, groups)
        expected, last = scan(
            x, dt, a, b, c, chunk_size=16, initial_states=states, return_final_states=True
        )
        out, states = scan_like_mamba(x, dt, a, b, c, states)
        torch.testing.assert_close(out, expected, **CLOSE)
        torch.testing.assert_close(states, last, **CLOSE)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_decoding_step_of_mamba_2_is_the_operator(groups: int) -> None:
    step = mamba_2_function("mamba2_selective_state_update")
    torch.manual_seed(0)
    states = torch.randn(BATCH, HEADS, DIM, STATE)
    x, dt, a, b, c = random_scan(1, groups)
    out, last = scan_like_mamba(x, dt, a, b, c, states)
    expected = step(
        states,  # changed in place
        x[:, 0],
        dt[:, 0, :, None].expand(-1, -1, DIM),
        a[:, None, None].expand(-1, DIM, STATE),
        b[:, 0],
        c[:, 0],
    )
    torch.testing.assert_close(out[:, 0], expected, **CLOSE)
    torch.testing.assert_close(last, states, **CLOSE)
