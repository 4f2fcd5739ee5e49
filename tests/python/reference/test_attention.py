"""Attention inside a chunk and its fusion with the memory set: sinks, soft caps, recalled keys."""

import torch

from h2o_prefill.reference import (
    causal_mask,
    fused_chunk_attention,
)

HEADS, CHUNK, MEMORY, DIM = 2, 6, 5, 8


def random_qkv(tokens=CHUNK):
    torch.manual_seed(0)
    return [torch.randn(HEADS, tokens, DIM, dtype=torch.float64) for _ in range(3)]


def random_call():
    return [*random_qkv(), *random_qkv(MEMORY)[1:], causal_mask(CHUNK)]


def assert_equal(got, expected, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_a_sink_is_a_key_without_a_value_and_recalled_keys_get_no_score():
    q, k, v, k_mem, v_mem, mask = random_call()
    sinks = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
    third = random_qkv(4)[1:]
    seen = torch.ones(CHUNK, 4, dtype=torch.bool)
    out, inter, intra = fused_chunk_attention(
        q, k, v, k_mem, v_mem, mask, scale=0.3, sinks=sinks, softcap=2.0, recalled=(*third, seen)
    )
    logits = 2 * torch.tanh(0.15 * q @ torch.cat([k_mem, third[0], k], 1).transpose(-1, -2))
    logits[..., -CHUNK:] = logits[..., -CHUNK:].masked_fill(~mask, -torch.inf)
    sink = sinks.unsqueeze(-1).expand(-1, CHUNK, -1)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    assert out.shape == (HEADS, CHUNK, DIM)
    assert_equal(out, weights @ torch.cat([v_mem, third[1], v], 1))
    for got, part in ((inter, logits[..., :MEMORY]), (intra, logits[..., -CHUNK:])):
        assert_equal(got, torch.cat([part, sink], -1).softmax(-1)[..., :-1])
