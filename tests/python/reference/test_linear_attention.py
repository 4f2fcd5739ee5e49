"""Linear attention: its forms against the plan's own code, and against each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_testing import Shape, make_qkv

from h2o_prefill.reference import (
    bidirectional_linear_attention,
    chunkwise_linear_attention,
    recurrent_linear_attention,
)
from h2o_prefill.reference.linear_attention import FEATURE_MAPS


def plan_chunkwise(Q, K, V, feature_map, chunk_size=64):
    """The plan's code; Q, K, V are (batch, seq_len, d), and the state has their dtype."""
    batch, seq_len, _ = Q.shape
    num_chunks = (seq_len + chunk_size - 1) // chunk_size
    Q = feature_map(Q)
    K = feature_map(K)
    pad_len = num_chunks * chunk_size - seq_len
    if pad_len > 0:
        Q = F.pad(Q, (0, 0, 0, pad_len))
        K = F.pad(K, (0, 0, 0, pad_len))
        V = F.pad(V, (0, 0, 0, pad_len))
    Q = Q.view(batch, num_chunks, chunk_size, -1)
    K = K.view(batch, num_chunks, chunk_size, -1)
    V = V.view(batch, num_chunks, chunk_size, -1)
    outputs = []
    state = torch.zeros(batch, Q.shape[-1], V.shape[-1], dtype=Q.dtype)
    for c in range(num_chunks):
        Q_c, K_c, V_c = Q[:, c], K[:, c], V[:, c]
        KV_c = torch.einsum("bcd,bcv->bcdv", K_c, V_c)
        S_intra = torch.cumsum(KV_c, dim=1)
        intra_out = torch.einsum("bcd,bcdv->bcv", Q_c, S_intra)
        inter_out = torch.einsum("bcd,bdv->bcv", Q_c, state)
        outputs.append(intra_out + inter_out)
        state = state + KV_c.sum(dim=1)
    output = torch.cat(outputs, dim=1)
    return output[:, :seq_len, :]


def plan_bidirectional(Q, K, V, feature_map, chunk_size):
    """The plan's sum of two directions."""
    forward = plan_chunkwise(Q, K, V, feature_map, chunk_size)
    reverse = plan_chunkwise(*(torch.flip(x, [1]) for x in (Q, K, V)), feature_map, chunk_size)
    return forward + torch.flip(reverse, [1])


def random_inputs(length=37, heads=(4, 2), seed=0):
    return make_qkv(Shape(2, *heads, length, 8, 5), torch.float64, seed=seed)


def random_decay(k, per_token=True):
    generator = torch.Generator().manual_seed(7)
    shape = k.shape[:3] if per_token else k.shape[1:2]
    return -torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_every_form_is_what_the_plan_computes(feature_map, chunk_size):
    q, k, v = random_inputs(heads=(6, 2))
    repeated = [q, *(x.repeat_interleave(3, 1) for x in (k, v))]
    flat = [x.flatten(0, 1) for x in repeated]
    phi = FEATURE_MAPS[feature_map]
    expected = plan_chunkwise(*flat, phi, chunk_size).view(2, 6, 37, 5)
    for out, _, _ in (
        recurrent_linear_attention(q, k, v, feature_map=feature_map),
        chunkwise_linear_attention(q, k, v, feature_map=feature_map, chunk_size=chunk_size),
    ):
        torch.testing.assert_close(out, expected)
    both = plan_bidirectional(*flat, phi, chunk_size).view(2, 6, 37, 5)
    out = bidirectional_linear_attention(q, k, v, feature_map=feature_map)
    torch.testing.assert_close(out, both)


def test_elu_plus_one_is_that_of_pytorch():
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    torch.testing.assert_close(FEATURE_MAPS["elu+1"](x), F.elu(x) + 1)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 5, 16, 100])
def test_chunkwise_is_recurrent(chunk_size, per_token, normalize):
    q, k, v = random_inputs()
    decay = random_decay(k, per_token)
    state = torch.randn(2, 2, 8, 5, dtype=torch.float64)
    given = (decay, state, state[..., 0].abs())
    expected = recurrent_linear_attention(q, k, v, *given, normalize=normalize, scale=0.3)
    actual = chunkwise_linear_attention(
        q, k, v, *given, chunk_size=chunk_size, normalize=normalize, scale=0.3
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_state_continues_a_sequence():
    q, k, v = random_inputs()
    decay = random_decay(k)
    whole = recurrent_linear_attention(q, k, v, decay, normalize=True)
    first = recurrent_linear_attention(
        q[:, :, :20], k[:, :, :20], v[:, :, :20], decay[:, :, :20], normalize=True
    )
    rest = recurrent_linear_attention(
        q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], decay[:, :, 20:], *first[1:], normalize=True
    )
    torch.testing.assert_close(torch.cat([first[0], rest[0]], 2), whole[0])
    torch.testing.assert_close(rest[1:], whole[1:])


@pytest.mark.parametrize("normalize", [False, True])
def test_both_directions_are_two_recurrences(normalize):
    q, k, v = random_inputs()
    decay = random_decay(k)

    def sums(*tensors):
        ones = v.new_ones(*v.shape[:3], 1)
        out = recurrent_linear_attention(tensors[0], tensors[1], tensors[2], tensors[3])[0]
        weights = recurrent_linear_attention(tensors[0], tensors[1], ones, tensors[3])[0]
        return out, weights

    forward = sums(q, k, v, decay)
    reverse = [x.flip(2) for x in sums(*(x.flip(2) for x in (q, k, v, decay)))]
    expected, weights = (f + r for f, r in zip(forward, reverse, strict=True))
    out = bidirectional_linear_attention(q, k, v, decay, normalize=normalize)
    torch.testing.assert_close(out, expected / weights if normalize else expected)


def test_the_diagonal_counts_twice_or_once():
    q, k, v = random_inputs(heads=(2, 2))
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    once = bidirectional_linear_attention(q, k, v, diagonal_once=True)
    torch.testing.assert_close(once, phi_q @ (phi_k.transpose(2, 3) @ v))
    twice = bidirectional_linear_attention(q, k, v)
    torch.testing.assert_close(twice - once, (phi_q * phi_k).sum(3, keepdim=True) * v)
