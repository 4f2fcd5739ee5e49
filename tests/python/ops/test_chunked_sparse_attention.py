"""The whole prefill of a layer: against the oracle, and the invariants of the method."""

from functools import partial

import pytest
import torch

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle
from h2o_prefill.testing import (
    DTYPES,
    Shape,
    assert_close_to_reference,
    assert_same_on_threads,
    compare_with_oracle,
    make_qkv,
)

S = 32
NO_STATE = (None,) * 5
OPTIONS = [{}, {"sink_tokens": 3}, {"dense_tail": 40}, {"gqa_reduce": "max"}]

# The oracle decides ties of its own float64 scores: sets are compared through what they lead to.
check = partial(compare_with_oracle, ops.chunked_sparse_attention, oracle.chunked_sparse_attention)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "column"])
def test_agrees_with_the_oracle(device, dtype, heads, layout):
    q, k, v = make_qkv(Shape(2, *heads, 150, 32, 48), dtype, device, layout)
    check(q, k, v, *NO_STATE, 0, S, 8, 8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("past", [0, 45])
def test_head_dims_of_latent_attention(device, dtype, past):
    """DeepSeek V2 and V3 have keys of 192 and values of 128."""
    q, k, v = make_qkv(Shape(1, 2, 2, 150, 192, 128), dtype, device, "transposed", past=past)
    ids = torch.randint(0, 9, (1, past + 150), generator=torch.Generator().manual_seed(5))
    recall = [t.to(device) for t in ops.lexical_recall(ids, past, S, 16, 3, max_count=1000)]
    check(q, k, v, *NO_STATE, 0, S, 8, 8, dense_tail=20)
    check(q, k, v, None, None, *recall, 0, S, 8, 8, recall_block=16)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("budgets", [(0, 0), (1, 0), (0, 1), (8, 8), (20, 4), (500, 500)], ids=str)
def test_budgets_and_options(device, budgets, options):
    q, k, v = make_qkv(Shape(1, 6, 2, 150, 16, 16), device=device)
    check(q, k, v, *NO_STATE, 0, S, *budgets, **options)


@pytest.mark.parametrize("length", [0, 1, S - 1, S, S + 1, 2 * S - 1, 2 * S + 128])
def test_awkward_lengths(device, length):
    check(*make_qkv(Shape(1, 4, 2, length, 16, 16), device=device), *NO_STATE, 0, S, 8, 8, 2)


@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[3:], ids=str)
def test_calls_in_multiples_of_the_chunk_equal_one_call(device, options):
    q, k, v = make_qkv(Shape(1, 4, 2, 7 * S + 5, 16, 16), device=device)
    whole = ops.chunked_sparse_attention(q, k, v, *NO_STATE, 0, S, 8, 8, **options)
    scores = memory = None
    begin, last_chunk_begin, outs = 0, 0, []
    for end in (2 * S, 3 * S, 6 * S, 7 * S + 5):
        out, scores, memory = ops.chunked_sparse_attention(
            q[:, :, begin:end], k[:, :, :end], v[:, :, :end], scores, memory, None, None, None,
            last_chunk_begin, S, 8, 8, **options,
        )  # fmt: skip
        last_chunk_begin = begin + (end - begin - 1) // S * S
        outs.append(out)
        begin = end
    assert torch.equal(torch.cat(outs, 2), whole[0])
    assert torch.equal(scores, whole[1]) and torch.equal(memory, whole[2])


def test_tokens_from_outside_prefill_are_candidates_with_score_zero(device):
    q, k, v = make_qkv(Shape(1, 4, 2, 3 * S, 16, 16), device=device)
    first = ops.chunked_sparse_attention(
        q[:, :, :S], k[:, :, :S], v[:, :, :S], *NO_STATE, 0, S, 4, 8
    )
    # Five tokens are decoded in between: the scores end before them.
    past = S + 5
    _, scores, memory = check(
        q[:, :, past:], k, v, first[1], first[2], None, None, None, 0, S, 4, 8
    )
    decoded = scores[:, :, S:past]
    assert (memory[..., -4:] == torch.arange(2 * S + 5 - 4, 2 * S + 5, device=device)).all()
    assert (decoded[:, :, -4:] > 0).all(), (
        "the local window holds the decoded tokens, which earn scores"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_memory_that_holds_everything_equals_dense_attention(device, dtype):
    q, k, v = make_qkv(Shape(1, 6, 2, 5 * S + 3, 32, 32), dtype, device)
    out, _, _ = ops.chunked_sparse_attention(q, k, v, *NO_STATE, 0, S, 100, 200)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact = sdpa(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    peer = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    assert_close_to_reference(out, exact, peer)


def test_one_chunk_is_phase_one_bit_by_bit(device):
    q, k, v = make_qkv(Shape(1, 4, 2, S, 32, 32), device=device)
    out, scores, memory = ops.chunked_sparse_attention(q, k, v, *NO_STATE, 0, S, 8, 8)
    alone = ops.intra_chunk_attention(q, k, v, S)
    assert torch.equal(out, alone[0]) and torch.equal(scores, alone[2]) and (memory == -1).all()


def test_scores_never_fall_and_count_every_query_twice_at_most(device):
    q, k, v = make_qkv(Shape(1, 4, 2, 6 * S, 16, 16), device=device)
    earlier = None
    for chunks in range(1, 7):
        end = chunks * S
        _, scores, _ = ops.chunked_sparse_attention(
            q[:, :, :end], k[:, :, :end], v[:, :, :end], *NO_STATE, 0, S, 8, 8
        )
        if earlier is not None:
            assert (scores[:, :, : end - S] >= earlier).all()
        # Every query votes once in phase 1, and once in phase 2 unless it is of the first chunk.
        total = scores.sum(-1)
        torch.testing.assert_close(
            total, torch.full_like(total, 2 * (2 * end - S)), rtol=1e-5, atol=0
        )
        earlier = scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("past", [0, 45])
def test_recall(device, dtype, options, past):
    shape = Shape(2, 4, 2, 150, 16, 16)
    q, k, v = make_qkv(shape, dtype, device, past=past)
    ids = torch.randint(0, 9, (2, past + 150), generator=torch.Generator().manual_seed(5))
    recall = [t.to(device) for t in ops.lexical_recall(ids, past, S, 16, 3, max_count=1000)]
    assert recall[1].numel() > 200
    with_recall = check(q, k, v, None, None, *recall, 0, S, 6, 6, recall_block=16, **options)
    without = ops.chunked_sparse_attention(q, k, v, *NO_STATE, 0, S, 6, 6, **options)
    assert not torch.equal(with_recall[0], without[0])
    # Recalled keys earn no score; only the order of additions may differ.
    torch.testing.assert_close(with_recall[1], without[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("token", [0, 31, 32, 70, 149])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_output_depends_on_a_later_token(device, token, options, dtype):
    q, k, v = make_qkv(Shape(1, 4, 2, 150, 16, 16), dtype, device=device)
    before, _, _ = ops.chunked_sparse_attention(q, k, v, *NO_STATE, 0, S, 8, 8, **options)
    for x in (q, k, v):
        x[:, :, token:] = torch.randn_like(x[:, :, token:]) * 5
    after, _, _ = ops.chunked_sparse_attention(q, k, v, *NO_STATE, 0, S, 8, 8, **options)
    torch.testing.assert_close(before[:, :, :token], after[:, :, :token], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [2, 8, 64])
def test_results_do_not_depend_on_the_number_of_threads(threads, dtype):
    q, k, v = make_qkv(Shape(2, 6, 2, 700, 64, 64), dtype)
    arguments = (q, k, v, *NO_STATE, 0, 256, 32, 32)
    assert_same_on_threads(lambda: ops.chunked_sparse_attention(*arguments), (1, threads))


def test_sixteen_chunks_of_extreme_logits_stay_finite(device):
    q, k, v = make_qkv(Shape(1, 2, 1, 16 * S, 16, 16), device=device)
    scale = 100 / (q @ k.transpose(-1, -2)).abs().max().item()
    out, scores, _ = check(q, k, v, *NO_STATE, 0, S, 8, 8, scale=scale)
    assert torch.isfinite(out).all() and torch.isfinite(scores).all()


def test_inputs_are_left_as_they_were(device):
    q, k, v = make_qkv(Shape(1, 2, 1, 3 * S, 16, 16), device=device)
    first = ops.chunked_sparse_attention(
        q[:, :, :S], k[:, :, :S], v[:, :, :S], *NO_STATE, 0, S, 4, 4
    )
    state = [first[1].clone(), first[2].clone()]
    ops.chunked_sparse_attention(
        q[:, :, S:], k, v, first[1], first[2], None, None, None, 0, S, 4, 4
    )
    assert torch.equal(first[1], state[0]) and torch.equal(first[2], state[1])


def good_arguments():
    q, k, v = make_qkv(Shape(1, 4, 2, 20, 16, 16))
    return {
        "q": q, "k": k, "v": v, "scores": None, "memory": None,
        "recall_offsets": None, "recall_positions": None, "recall_visible_from": None,
        "last_chunk_begin": 0, "chunk_size": 8, "local_window": 2, "heavy_budget": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be >= 1, got 0"),
        ({"local_window": -3}, "local_window must be >= 0, got -3"),
        ({"heavy_budget": -1}, "heavy_budget must be >= 0, got -1"),
        ({"dense_tail": -1}, "dense_tail must be >= 0, got -1"),
        ({"gqa_reduce": "mean"}, 'gqa_reduce must be "sum" or "max", got "mean"'),
        ({"last_chunk_begin": 1}, r"last_chunk_begin must be in \[0, 0\].*got 1"),
        ({"q": torch.randint(0, 5, (1, 4, 20, 16))}, "q must be float32, .* got int64"),
        ({"q": torch.randn(4, 20, 16)}, "q must have 4 dimensions"),
        ({"q": torch.randn(1, 3, 20, 16)}, "multiple of the KV heads, got 3 and 2"),
        ({"q": torch.randn(1, 4, 21, 16)}, "at least as long as q"),
        ({"k": torch.randn(1, 2, 20, 8)}, "k must have the head dim of q"),
        ({"v": torch.randn(1, 2, 19, 16)}, "v must have the length of k"),
        (
            {"k": torch.randn(1, 2, 20, 16).double()},
            r"k must have dtype and device of q \(float32 on cpu\), got float64",
        ),
        ({"scores": torch.zeros(1, 2, 21)}, "scores must not be longer than k"),
        ({"memory": torch.zeros(1, 2, 4)}, "memory must be int32, got float32"),
        ({"recall_offsets": torch.zeros(4, dtype=torch.int32)}, "must be given together"),
    ],
    ids=lambda x: str(list(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        ops.chunked_sparse_attention(**{**good_arguments(), **change})


def test_bad_recall_lists_are_refused():
    arguments = good_arguments() | {"recall_block": 8}
    lists = {
        "recall_offsets": torch.tensor([0, 1, 2, 2]),
        "recall_positions": torch.tensor([3, 4]),
        "recall_visible_from": torch.tensor([5, 9]),
    }
    for change in (
        {"recall_offsets": torch.tensor([0, 2, 1, 2])},
        {"recall_positions": torch.tensor([3, 20])},
        {"recall_visible_from": torch.tensor([5])},
    ):
        with pytest.raises(ValueError, match="recall_"):
            ops.chunked_sparse_attention(
                **arguments | {n: t.int() for n, t in (lists | change).items()}
            )
