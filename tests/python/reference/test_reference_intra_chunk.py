"""Task 2: causal attention inside a chunk."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill.reference import (
    ChunkedKVCache,
    apply_rope_global,
    causal_mask,
    intra_chunk_attention,
    populate_kv_cache,
    rope_frequencies,
)


def random_qkv(heads=2, tokens=7, head_dim=8, dtype=torch.float64):
    torch.manual_seed(0)
    return tuple(torch.randn(heads, tokens, head_dim, dtype=dtype) for _ in range(3))


def test_attention_matches_scaled_dot_product_attention():
    """Numerical correctness: match reference implementation."""
    q, k, v = random_qkv()
    output, weights = intra_chunk_attention(q, k, v, causal_mask(7))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 7, dtype=q.dtype))


def test_rope_of_chunk_one_starts_at_global_position_s():
    """RoPE position correctness: chunk 1 position 0 uses global position S."""
    q, k, _ = random_qkv(tokens=1)
    frequencies = rope_frequencies(8)
    turned_q, turned_k = apply_rope_global(q, k, 1, 16, frequencies)
    angles = 16 * frequencies.double()
    for turned, plain in ((turned_q, q), (turned_k, k)):
        pairs = torch.complex(plain[..., :4], plain[..., 4:])
        expected = pairs * torch.polar(torch.ones_like(angles), angles)
        expected = torch.cat([expected.real, expected.imag], dim=-1)
        torch.testing.assert_close(turned, expected, rtol=0, atol=1e-6)


def test_rope_is_continuous_across_chunk_boundaries():
    """RoPE position correctness: chunk by chunk equals the whole text, in a later call too."""
    q, k, _ = random_qkv(tokens=12)
    frequencies = rope_frequencies(8)
    whole = apply_rope_global(q, k, 0, 12, frequencies, begin=3)
    for chunk in range(3):
        rows = slice(4 * chunk, 4 * chunk + 4)
        part = apply_rope_global(q[:, rows], k[:, rows], chunk, 4, frequencies, begin=3)
        for got, expected in zip(part, whole, strict=True):
            torch.testing.assert_close(got, expected[:, rows], rtol=0, atol=0)


def test_rope_makes_logits_depend_on_distance_only():
    q, k, _ = random_qkv(tokens=1)
    frequencies = rope_frequencies(8).double()
    logits = []
    for shift in (0, 100):
        turned_q, _ = apply_rope_global(q, q, 0, 1, frequencies, begin=9 + shift)
        _, turned_k = apply_rope_global(k, k, 0, 1, frequencies, begin=4 + shift)
        logits.append((turned_q * turned_k).sum(-1))
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-10)


def test_no_output_depends_on_a_later_input():
    """Causal mask correctness: d out_i / d in_j = 0 for j > i."""
    inputs = [x.requires_grad_() for x in random_qkv(tokens=6)]
    for i in range(6):
        output, _ = intra_chunk_attention(*inputs, causal_mask(6))
        for gradient in torch.autograd.grad(output[:, i].sum(), inputs):
            assert (gradient[:, i + 1 :] == 0).all()
        _, _, gradient_v = torch.autograd.grad(
            intra_chunk_attention(*inputs, causal_mask(6))[0][:, i].sum(), inputs
        )
        assert (gradient_v[:, : i + 1] != 0).all()  # the test sees gradients where there are some


def test_causal_mask_of_more_keys_than_queries_is_aligned_at_the_end():
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]


def test_cache_holds_a_chunk_at_its_positions_and_nothing_else():
    """KV cache write: correct positions (read back and compare)."""
    _, k, v = random_qkv(tokens=3, head_dim=4, dtype=torch.float32)
    cache = ChunkedKVCache(num_layers=2, num_heads=2, max_seq_len=16, head_dim=4)
    populate_kv_cache(cache.layer(1), k, v, chunk_idx=2, chunk_size=4, begin=1)
    assert (cache.buffer[1, 0, :, 9:12] == k).all()
    assert (cache.buffer[1, 1, :, 9:12] == v).all()
    assert cache.buffer.count_nonzero() == k.count_nonzero() + v.count_nonzero()


def test_cache_write_beyond_the_buffer_is_refused_and_writes_nothing():
    """KV cache write: no buffer overflow."""
    _, k, v = random_qkv(tokens=4, head_dim=4, dtype=torch.float32)
    cache = ChunkedKVCache(num_layers=1, num_heads=2, max_seq_len=10, head_dim=4)
    with pytest.raises(ValueError, match=r"positions must be in \[0, 10\), got \[8, 12\)"):
        populate_kv_cache(cache.layer(0), k, v, chunk_idx=2, chunk_size=4)
    with pytest.raises(ValueError, match=r"at most chunk_size \(3\) tokens, got 4"):
        populate_kv_cache(cache.layer(0), k, v, chunk_idx=0, chunk_size=3)
    assert (cache.buffer == 0).all()
