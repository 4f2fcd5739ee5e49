"""Oracles of the operators: the invariants of the method."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from h2o_prefill.reference import ops

S, L, H = 16, 4, 4
GROUPS = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])


def random_qkv(tokens, heads=(4, 2), batch=2, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    hq, hkv = heads
    return (
        2 * torch.randn(batch, hq, tokens, 8, dtype=dtype),
        2 * torch.randn(batch, hkv, tokens, 8, dtype=dtype),
        torch.randn(batch, hkv, tokens, 6, dtype=dtype),
    )


def prefill(q, k, v, calls=None, local=L, heavy=H, recall=(None, None, None), **options):
    """Run calls of the given lengths one after another; return all outputs, scores and memory."""
    scores, memory, last, past, outputs = None, None, 0, 0, []
    for new in calls or [q.shape[2]]:
        end = past + new
        out, scores, memory = ops.chunked_sparse_attention(
            q[:, :, past:end],
            k[:, :, :end],
            v[:, :, :end],
            scores,
            memory,
            *recall,
            last,
            S,
            local,
            heavy,
            **options,
        )
        outputs.append(out)
        last = past + (new - 1) // S * S
        past = end
    return torch.cat(outputs, dim=2), scores, memory


def dense(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def assert_equal(got, expected, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@GROUPS
@pytest.mark.parametrize("tokens", [1, S - 1, S, S + 1, 3 * S + 5])
def test_phase_one_hands_out_g_per_query(heads, tokens):
    """Invariant: sum_j colsum[j] = G * rows, phase 1."""
    q, k, v = random_qkv(tokens, heads)
    _, _, colsum = ops.intra_chunk_attention(q, k, v, S)
    total = torch.full((2, heads[1]), heads[0] / heads[1] * tokens, dtype=q.dtype)
    assert_equal(colsum.sum(-1), total)


@GROUPS
def test_phase_two_hands_out_g_per_query(heads):
    """Invariant: sum_j colsum[j] = G * rows, phase 2; absent entries get none."""
    q, k, v = random_qkv(30, heads)
    indices = torch.tensor([0, 3, 4, 11, -1, -1], dtype=torch.int32).expand(2, heads[1], -1)
    _, _, colsum = ops.memory_attention(q[:, :, -7:], k, v, indices)
    total = torch.full((2, heads[1]), heads[0] / heads[1] * 7, dtype=q.dtype)
    assert_equal(colsum.sum(-1), total)
    assert (colsum[..., 4:] == 0).all()


@GROUPS
def test_all_scores_of_a_prompt_sum_to_the_votes_cast(heads):
    """Invariant: every query votes once in its chunk and, from chunk 1 on, once in the memory."""
    q, k, v = random_qkv(3 * S + 5, heads)
    _, scores, _ = prefill(q, k, v)
    votes = heads[0] / heads[1] * (3 * S + 5 + 2 * S + 5)
    assert_equal(scores.sum(-1), torch.full((2, heads[1]), votes, dtype=q.dtype), atol=1e-10)


@pytest.mark.parametrize("gqa_reduce", ["sum", "max"])
def test_scores_never_fall_from_call_to_call(gqa_reduce):
    """Invariant: scores never fall."""
    q, k, v = random_qkv(4 * S)
    before = torch.zeros(2, 2, 0, dtype=q.dtype)
    for calls in range(1, 5):
        tokens = calls * S
        short = (x[:, :, :tokens] for x in (q, k, v))
        _, scores, _ = prefill(*short, calls=[S] * calls, gqa_reduce=gqa_reduce)
        assert (scores[..., : before.shape[-1]] >= before).all()
        before = scores


@GROUPS
@pytest.mark.parametrize(
    ("sinks", "local", "heavy"), [(0, 0, 53), (0, 53, 0), (0, 20, 33), (53, 0, 0), (5, 30, 18)]
)
@pytest.mark.parametrize("calls", [None, [7, 46], [16, 32, 5]])
def test_a_memory_that_holds_everything_is_dense(heads, sinks, local, heavy, calls):
    """Invariant: with K + L + H >= N the result equals dense attention."""
    q, k, v = random_qkv(53, heads)
    out, _, _ = prefill(q, k, v, calls, local, heavy, sink_tokens=sinks)
    assert_equal(out, dense(q, k, v))


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("calls", [[S, 2 * S + 5], [2 * S, S + 5], [S, S, S, 5]])
def test_calls_in_multiples_of_s_equal_one_call(calls, sinks):
    q, k, v = random_qkv(3 * S + 5)
    whole = prefill(q, k, v, sink_tokens=sinks)
    parts = prefill(q, k, v, calls, sink_tokens=sinks)
    assert_equal(parts[0], whole[0])
    assert_equal(parts[1], whole[1])
    assert (parts[2] == whole[2]).all()


def test_a_call_that_ends_inside_a_chunk_starts_a_new_one():
    q, k, v = random_qkv(2 * S)
    whole, broken = prefill(q, k, v), prefill(q, k, v, [S + 3, S - 3])
    assert_equal(broken[0][:, :, : S + 3], whole[0][:, :, : S + 3])
    assert (broken[0][:, :, S + 3 :] - whole[0][:, :, S + 3 :]).abs().max() > 1e-3
    expected = ops.select_memory(broken[1], broken[2][..., :0], 0, S, L, H, 0)
    expected = ops.select_memory(
        prefill(*(x[:, :, : S + 3] for x in (q, k, v)))[1], expected, S, S + 3, L, H, 0
    )
    assert (broken[2] == expected).all()


def test_one_chunk_without_history_is_phase_one_alone():
    """Single chunk = plain causal attention, bit-identical to phase 1; its set is empty."""
    q, k, v = random_qkv(S)
    out, scores, memory = prefill(q, k, v)
    phase_one = ops.intra_chunk_attention(q, k, v, S)
    assert (out == phase_one[0]).all() and (scores == phase_one[2]).all()
    assert memory.shape == (2, 2, L + H) and (memory == -1).all()


@GROUPS
@pytest.mark.parametrize("tokens", [0, 1, S - 1, S, S + 1, 2 * S - 1, 2 * S + 128])
def test_one_softmax_equals_two_phases_merged(heads, tokens):
    """Phase structure: intra, memory, merge by chunks give what one softmax per row gives."""
    q, k, v = random_qkv(tokens, heads)
    out, scores, memory = prefill(q, k, v)
    assert out.shape == (2, 4, tokens, 6) and scores.shape == (2, heads[1], tokens)
    expected, lse, phased = ops.intra_chunk_attention(q, k, v, S)
    attended = memory[..., :0]
    for begin in range(S, tokens, S):
        attended = ops.select_memory(phased, attended, begin - S, begin, L, H, 0)
        rows = slice(begin, begin + S)
        part, part_lse, votes = ops.memory_attention(q[:, :, rows], k, v, attended)
        expected[:, :, rows], _ = ops.merge_states(
            expected[:, :, rows], lse[:, :, rows], part, part_lse
        )
        phased = phased.scatter_add(-1, attended.long(), votes)
    assert_equal(out, expected)
    assert_equal(scores, phased)
    if tokens > S:
        assert (memory == attended).all()


def test_tokens_from_outside_prefill_score_zero_and_are_candidates():
    """Decode tokens score 0, are in the local window and compete for the heavy budget."""
    q, k, v = random_qkv(3 * S)
    decoded = range(S, S + 6)  # these arrived without the operator: no scores for them
    _, scores, memory = prefill(*(x[:, :, :S] for x in (q, k, v)))
    _, scores, memory = ops.chunked_sparse_attention(
        q[:, :, S + 6 :], k, v, scores, memory, None, None, None, 0, S, 2, S + 2
    )
    # All of chunk 0 outranks a score of 0; two places are left, and of equals the lower win them.
    first = ops.select_memory(scores[..., :S], memory[..., :0], 0, S + 6, 2, S + 2, 0)
    assert first[0, 0].tolist() == [*range(S), S, S + 1, S + 4, S + 5]
    assert ((memory >= 0) & (memory < S + 6 + S)).all()
    outside = [j for j in decoded if not (first == j).any()]
    assert outside == [S + 2, S + 3] and (scores[..., outside] == 0).all()


def test_missing_scores_are_zero():
    q, k, v = random_qkv(3 * S)
    args = (q[:, :, S:], k, v)
    rest = (None, None, None, 0, S, L, H)
    without = ops.chunked_sparse_attention(*args, None, None, *rest)
    zeros = torch.zeros(2, 2, S, dtype=q.dtype)
    empty = torch.full((2, 2, L + H), -1, dtype=torch.int32)
    for got, expected in zip(
        ops.chunked_sparse_attention(*args, zeros, empty, *rest), without, strict=True
    ):
        assert (got == expected).all()


def test_inputs_are_left_as_they_were():
    q, k, v = random_qkv(3 * S)
    _, scores, memory = prefill(*(x[:, :, : 2 * S] for x in (q, k, v)))
    held = scores.clone(), memory.clone()
    ops.chunked_sparse_attention(
        q[:, :, 2 * S :], k, v, scores, memory, None, None, None, S, S, L, H
    )
    assert (scores == held[0]).all() and (memory == held[1]).all()


OPTIONS = {
    "default": {},
    "sinks": {"sink_tokens": 2},
    "dense_tail": {"dense_tail": 9},
    "max": {"gqa_reduce": "max"},
    "recall": {"recall_block": 8},
    "all": {"sink_tokens": 2, "dense_tail": 9, "gqa_reduce": "max", "recall_block": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("changed", [3, S, 2 * S - 1, 2 * S + 3, 3 * S + 4])
def test_a_changed_token_changes_nothing_before_it(name, changed):
    """Causality: perturbation of token t leaves every output before t bit-identical."""
    torch.manual_seed(0)
    vocabulary = random_qkv(7, batch=1)
    position = random_qkv(3 * S + 5, batch=1, seed=1)
    ids = torch.randint(0, 6, (1, 3 * S + 5))

    def outputs(token_ids):
        q, k, v = (
            word[:, :, token_ids[0]] + place
            for word, place in zip(vocabulary, position, strict=True)
        )
        options = dict(OPTIONS[name])
        if "recall_block" in options:
            options["recall"] = ops.lexical_recall(token_ids, 0, S, 8, 2, max_count=99)
        return prefill(q, k, v, **options)[0]

    other = ids.clone()
    other[0, changed] = 6
    before, after = outputs(ids), outputs(other)
    assert (before[:, :, :changed] == after[:, :, :changed]).all()
    assert (before[:, :, changed:] != after[:, :, changed:]).any(-1).all(1)[0, 0]


def test_dense_tail_is_dense_and_off_the_chain():
    q, k, v = random_qkv(3 * S + 5)
    plain, tail = prefill(q, k, v), prefill(q, k, v, dense_tail=S + 9)
    assert (tail[0][:, :, : 2 * S - 4] == plain[0][:, :, : 2 * S - 4]).all()
    assert_equal(tail[0][:, :, 2 * S - 4 :], dense(q, k, v)[:, :, 2 * S - 4 :])
    assert (tail[1] == plain[1]).all() and (tail[2] == plain[2]).all()
    assert_equal(prefill(q, k, v, dense_tail=999)[0], dense(q, k, v))


def test_gqa_max_takes_the_largest_column_sum_of_the_group():
    q, k, v = random_qkv(2 * S)
    alone = [prefill(q[:, [h]], k[:, [h // 2]], v[:, [h // 2]])[1] for h in range(4)]
    first_chunk = [scores[..., S:] for scores in alone]  # chunk 1 got no vote from a memory
    _, scores, _ = prefill(q, k, v, gqa_reduce="max")
    for head in range(2):
        expected = torch.maximum(first_chunk[2 * head], first_chunk[2 * head + 1])
        assert_equal(scores[:, [head], S:], expected)
    with pytest.raises(ValueError, match="gqa_reduce must be 'sum' or 'max', got 'mean'"):
        prefill(q, k, v, gqa_reduce="mean")


def test_gqa_max_equals_sum_without_groups():
    q, k, v = random_qkv(3 * S, heads=(4, 4))
    for got, expected in zip(prefill(q, k, v, gqa_reduce="max"), prefill(q, k, v), strict=True):
        assert (got == expected).all()


def recall_lists(blocks):
    """Turn [(position, visible_from), ...] per block into the three tensors."""
    offsets = list(accumulate((len(block) for block in blocks), initial=0))
    entries = [entry for block in blocks for entry in block]
    positions, visible_from = zip(*entries, strict=True) if entries else ((), ())
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (offsets, positions, visible_from))


def test_recall_of_everything_is_dense_and_off_the_chain():
    q, k, v = random_qkv(3 * S)
    everything = [(j, 0) for j in range(3 * S)]
    recall = recall_lists([everything] * (2 * 6))
    plain, recalled = prefill(q, k, v), prefill(q, k, v, recall=recall, recall_block=8)
    assert_equal(recalled[0], dense(q, k, v))
    assert (recalled[1] == plain[1]).all() and (recalled[2] == plain[2]).all()


def test_a_recalled_key_in_the_memory_of_a_head_is_not_counted_twice():
    q, k, v = random_qkv(2 * S, batch=1)
    plain, _, memory = prefill(q, k, v)
    mine, other = set(memory[0, 0].tolist()), set(memory[0, 1].tolist())
    key = min(mine - other)
    recall = recall_lists([[], [(key, 0)]])
    out, _, _ = prefill(q, k, v, recall=recall, recall_block=S)
    assert (out[:, :2] == plain[:, :2]).all()  # query heads 0 and 1 read KV head 0
    assert (out[:, 2:, S:] != plain[:, 2:, S:]).any(-1).all()


def test_a_recalled_key_is_seen_from_its_row_on_and_in_its_block_only():
    q, k, v = random_qkv(3 * S, batch=1)
    plain, _, _ = prefill(q, k, v, local=0, heavy=0)
    recall = recall_lists([[], [], [(5, S + 3)], [], [], []])
    out, _, _ = prefill(q, k, v, local=0, heavy=0, recall=recall, recall_block=8)
    changed = (out != plain).any(-1).all(1)[0].nonzero().flatten().tolist()
    assert changed == list(range(S + 3, S + 8))
    keys = torch.tensor([5, *range(S, S + 4)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, [S + 3]], k[:, :, keys], v[:, :, keys], enable_gqa=True
    )
    assert_equal(out[:, :, [S + 3]], expected)


def test_a_key_of_the_rows_own_chunk_is_not_recalled():
    q, k, v = random_qkv(2 * S, batch=1)
    plain, _, _ = prefill(q, k, v)
    recall = recall_lists([[(7, 0)], [(S + 9, 0)]])  # row 0 must not see key 7, nor row S key S + 9
    out, _, _ = prefill(q, k, v, recall=recall, recall_block=S)
    assert (out == plain).all()


def test_recall_positions_are_absolute_in_a_later_call_and_belong_to_a_batch_row():
    q, k, v = random_qkv(2 * S)
    _, scores, memory = prefill(*(x[:, :, :S] for x in (q, k, v)))
    recall = recall_lists([[], [], [], [(1, S + 9)]])  # batch row 1, second block of the call

    def second_call(*lists):
        return ops.chunked_sparse_attention(
            q[:, :, S:], k, v, scores, memory, *lists, 0, S, 0, 0, recall_block=8
        )[0]

    changed = (second_call(*recall) != second_call(None, None, None)).any(-1).any(1)
    assert not changed[0].any()
    assert changed[1].nonzero().flatten().tolist() == list(range(9, S))


def test_memory_attention_over_nothing():
    q, k, v = random_qkv(5)
    for width in (0, 3):
        indices = torch.full((2, 2, width), -1, dtype=torch.int32)
        out, lse, colsum = ops.memory_attention(q, k, v, indices)
        assert (out == 0).all() and (lse == -torch.inf).all()
        assert colsum.shape == (2, 2, width) and (colsum == 0).all()


def test_memory_attention_matches_attention_over_the_gathered_keys():
    q, k, v = random_qkv(20)
    indices = torch.tensor([[1, 4, 9], [0, 2, 19]], dtype=torch.int32).expand(2, -1, -1)
    out, lse, _ = ops.memory_attention(q, k, v, indices, scale=0.3)
    keys, values = ops.gather_rows(k, indices), ops.gather_rows(v, indices)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, scale=0.3, enable_gqa=True
    )
    assert_equal(out, expected)
    logits = 0.3 * q @ keys.repeat_interleave(2, 1).transpose(-1, -2)
    assert_equal(lse, logits.logsumexp(-1))


def test_merge_states_ignores_an_empty_side():
    out = torch.randn(1, 2, 3, 4)
    lse = torch.randn(1, 2, 3)
    poison, nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for got in (
        ops.merge_states(out, lse, poison, nothing),
        ops.merge_states(poison, nothing, out, lse),
    ):
        assert (got[0] == out).all() and (got[1] == lse).all()
    both = ops.merge_states(poison, nothing, poison, nothing)
    assert (both[0] == 0).all() and (both[1] == -torch.inf).all()


def test_merge_states_of_far_apart_lse_is_finite():
    out_a, out_b = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), 3.0)
    out, lse = ops.merge_states(out_a, torch.tensor([[[1e4]]]), out_b, torch.tensor([[[-1e4]]]))
    assert (out == 1).all() and lse.item() == 1e4


@pytest.mark.parametrize(
    ("dtype", "statistics"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_dtypes_of_the_results(dtype, statistics):
    q, k, v = random_qkv(2 * S, dtype=dtype)
    out, scores, memory = prefill(q, k, v)
    assert (out.dtype, scores.dtype, memory.dtype) == (dtype, statistics, torch.int32)
    out, lse, colsum = ops.intra_chunk_attention(q, k, v, S)
    assert (out.dtype, lse.dtype, colsum.dtype) == (dtype, statistics, statistics)
    out, lse, colsum = ops.memory_attention(q, k, v, memory)
    assert (out.dtype, lse.dtype, colsum.dtype) == (dtype, statistics, statistics)
    out, lse = ops.merge_states(out, lse, out, lse)
    assert (out.dtype, lse.dtype) == (dtype, statistics)


def test_a_call_without_tokens_changes_no_state():
    q, k, v = random_qkv(2 * S)
    _, scores, memory = prefill(q, k, v)
    out, same_scores, same_memory = ops.chunked_sparse_attention(
        q[:, :, :0], k, v, scores, memory, None, None, None, S, S, L, H
    )
    assert out.shape == (2, 4, 0, 6)
    assert (same_scores == scores).all() and (same_memory == memory).all()
