"""Task 5: fusion by online softmax."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill.reference import (
    OnlineSoftmaxState,
    causal_mask,
    finalize_online_softmax,
    fused_chunk_attention,
    init_online_softmax_from_inter,
    update_online_softmax_with_intra,
)

HEADS, CHUNK, MEMORY, DIM = 2, 6, 5, 4


def random_inputs(magnitude=1.0, dtype=torch.float64):
    """Return logits and values of memory and chunk, the chunk's logits masked."""
    torch.manual_seed(0)
    inter = magnitude * (2 * torch.rand(HEADS, CHUNK, MEMORY, dtype=dtype) - 1)
    intra = magnitude * (2 * torch.rand(HEADS, CHUNK, CHUNK, dtype=dtype) - 1)
    intra = intra.masked_fill(~causal_mask(CHUNK), -torch.inf)
    v_mem = torch.randn(HEADS, MEMORY, DIM, dtype=dtype)
    return inter, intra, v_mem, torch.randn(HEADS, CHUNK, DIM, dtype=dtype)


def fuse(first, first_values, second, second_values):
    state = init_online_softmax_from_inter(first, first_values)
    return finalize_online_softmax(update_online_softmax_with_intra(state, second, second_values))


def single_pass(inter, intra, v_mem, v):
    return torch.cat([inter, intra], -1).softmax(-1) @ torch.cat([v_mem, v], -2)


def random_qkv(dtype=torch.float64):
    torch.manual_seed(1)
    chunk = [torch.randn(HEADS, CHUNK, DIM, dtype=dtype) for _ in range(3)]
    return [*chunk, *(torch.randn(HEADS, MEMORY, DIM, dtype=dtype) for _ in range(2))]


def test_two_passes_equal_one_softmax_over_both():
    """Mathematical equivalence: exact match to softmax(cat([inter_logits, intra_logits]))."""
    inter, intra, v_mem, v = random_inputs()
    expected = single_pass(inter, intra, v_mem, v)
    torch.testing.assert_close(fuse(inter, v_mem, intra, v), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_a_hundred_are_stable(dtype):
    """Numerical stability: no inf or nan with logits in [-100, 100]."""
    inter, intra, v_mem, v = random_inputs(magnitude=100.0, dtype=dtype)
    output = fuse(inter, v_mem, intra, v)
    expected = single_pass(*(x.double() for x in (inter, intra, v_mem, v)))
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(-100.0, 100.0), (100.0, -100.0)])
def test_one_side_that_dominates_wins_without_overflow(low, high):
    """Numerical stability: memory at one end of the range, chunk at the other."""
    inter, intra, v_mem, v = random_inputs(dtype=torch.float32)
    output = fuse(inter + low, v_mem, intra + high, v)
    winner = intra.softmax(-1) @ v if high > low else inter.softmax(-1) @ v_mem
    torch.testing.assert_close(output, winner, rtol=0, atol=1e-5)


def test_order_does_not_matter():
    """Order independence: same result regardless of inter/intra order."""
    inter, intra, v_mem, v = random_inputs(magnitude=30.0)
    there, back = fuse(inter, v_mem, intra, v), fuse(intra, v, inter, v_mem)
    torch.testing.assert_close(there, back, rtol=0, atol=1e-13)


def test_fused_attention_leaks_no_future_key_or_value():
    """Causal correctness: d out_i / d K_j = 0 for j > i in the chunk; all see the memory."""
    inputs = [x.requires_grad_() for x in random_qkv()]
    for i in range(CHUNK):
        output, _, _ = fused_chunk_attention(*inputs, causal_mask(CHUNK))
        _, key, value, mem_key, mem_value = torch.autograd.grad(output[:, i].sum(), inputs)
        assert (key[:, i + 1 :] == 0).all() and (value[:, i + 1 :] == 0).all()
        assert (value[:, : i + 1] != 0).all()
        assert (mem_key != 0).all() and (mem_value != 0).all()


def test_output_shapes():
    """Output shape: [num_heads, chunk_len, head_dim]."""
    output, inter_weights, intra_weights = fused_chunk_attention(*random_qkv(), causal_mask(CHUNK))
    assert output.shape == (HEADS, CHUNK, DIM)
    assert inter_weights.shape == (HEADS, CHUNK, MEMORY)
    assert intra_weights.shape == (HEADS, CHUNK, CHUNK)


def test_weights_for_the_scores_are_two_softmaxes_of_their_own():
    _, inter_weights, intra_weights = fused_chunk_attention(*random_qkv(), causal_mask(CHUNK))
    ones = torch.ones(HEADS, CHUNK, dtype=torch.float64)
    torch.testing.assert_close(inter_weights.sum(-1), ones)
    torch.testing.assert_close(intra_weights.sum(-1), ones)
    assert (intra_weights.triu(1) == 0).all()


def test_empty_memory_slots_change_nothing():
    q, k, v, k_mem, v_mem = random_qkv()
    mask = torch.tensor([True, True, True, False, False]).expand(HEADS, -1)
    padded = fused_chunk_attention(q, k, v, k_mem, v_mem, causal_mask(CHUNK), mask)
    short = fused_chunk_attention(q, k, v, k_mem[:, :3], v_mem[:, :3], causal_mask(CHUNK))
    torch.testing.assert_close(padded[0], short[0])
    torch.testing.assert_close(padded[1][..., :3], short[1])
    assert (padded[1][..., 3:] == 0).all()


@pytest.mark.parametrize("slots", [0, MEMORY])
def test_a_memory_without_a_key_leaves_the_chunk_alone(slots):
    q, k, v, k_mem, v_mem = random_qkv()
    mask = torch.zeros(HEADS, slots, dtype=torch.bool)
    output, inter_weights, intra_weights = fused_chunk_attention(
        q, k, v, k_mem[:, :slots], v_mem[:, :slots], causal_mask(CHUNK), mask
    )
    torch.testing.assert_close(output, intra_weights @ v)
    assert (inter_weights == 0).all()


def test_a_state_that_saw_no_key_gives_zero():
    state = OnlineSoftmaxState(
        m=torch.full((1, 2), -torch.inf), l=torch.zeros(1, 2), o=torch.zeros(1, 2, 3)
    )
    assert (finalize_online_softmax(state) == 0).all()
