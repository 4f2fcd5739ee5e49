"""RoPE, attention inside a chunk, and its fusion with the memory set by online softmax."""

import pytest
import torch

from h2o_prefill.reference import (
    causal_mask,
    finalize_online_softmax,
    fused_chunk_attention,
    init_online_softmax_from_inter,
    update_online_softmax_with_intra,
)

HEADS, CHUNK, MEMORY, DIM = 2, 6, 5, 8


def random_qkv(tokens=CHUNK):
    torch.manual_seed(0)
    return [torch.randn(HEADS, tokens, DIM, dtype=torch.float64) for _ in range(3)]


def random_call():
    return [*random_qkv(), *random_qkv(MEMORY)[1:], causal_mask(CHUNK)]


def assert_equal(got, expected, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def fuse(first, first_values, second, second_values):
    state = init_online_softmax_from_inter(first, first_values)
    return finalize_online_softmax(update_online_softmax_with_intra(state, second, second_values))


@pytest.mark.parametrize(("inter", "intra"), [(1, 1), (30, 30), (100, 100), (-100, 100), (100, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_passes_equal_one_softmax_over_both(inter, intra, dtype):
    """In either order, with logits of any size, and with one side far above the other."""
    torch.manual_seed(0)
    inter_logits = inter + inter * torch.randn(HEADS, CHUNK, MEMORY, dtype=dtype)
    intra_logits = intra + intra * torch.randn(HEADS, CHUNK, CHUNK, dtype=dtype)
    intra_logits = intra_logits.masked_fill(~causal_mask(CHUNK), -torch.inf)
    v_mem, v = (torch.randn(HEADS, size, DIM, dtype=dtype) for size in (MEMORY, CHUNK))
    weights = torch.cat([inter_logits, intra_logits], -1).double().softmax(-1)
    expected = weights @ torch.cat([v_mem, v], -2).double()
    atol = 1e-5 if dtype == torch.float32 else 1e-12
    for got in (
        fuse(inter_logits, v_mem, intra_logits, v),
        fuse(intra_logits, v, inter_logits, v_mem),
    ):
        assert_equal(got.double(), expected, atol)


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
