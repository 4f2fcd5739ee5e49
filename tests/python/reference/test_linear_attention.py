"""Linear attention: its forms against the definition, and against each other."""

import pytest
import torch
from op_testing import Shape, make_qkv

from h2o_prefill.reference import (
    bidirectional_linear_attention,
    chunkwise_linear_attention,
    recurrent_linear_attention,
)
from h2o_prefill.reference.linear_attention import FEATURE_MAPS


def random_inputs(length=37, heads=(4, 2), seed=0):
    return make_qkv(Shape(2, *heads, length, 8, 5), torch.float64, seed=seed)


def random_decay(k, per_token=True):
    generator = torch.Generator().manual_seed(7)
    shape = k.shape[:3] if per_token else k.shape[1:2]
    return -torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_every_form_is_what_the_definition_says(feature_map, chunk_size):
    """Row i has the sum over j <= i of phi(q_i) . phi(k_j) v_j; a reverse pass that over j >= i."""
    q, k, v = random_inputs(heads=(6, 2))
    phi = FEATURE_MAPS[feature_map]
    keys, values = (x.repeat_interleave(3, 1) for x in (phi(k), v))
    weights = phi(q) @ keys.transpose(2, 3)
    for out, _, _ in (
        recurrent_linear_attention(q, k, v, feature_map=feature_map),
        chunkwise_linear_attention(q, k, v, feature_map=feature_map, chunk_size=chunk_size),
    ):
        torch.testing.assert_close(out, weights.tril() @ values)
    out = bidirectional_linear_attention(q, k, v, feature_map=feature_map)
    torch.testing.assert_close(out, (weights.tril() + weights.triu()) @ values)


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
