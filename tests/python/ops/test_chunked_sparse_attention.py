"""The whole prefill of a layer: against the oracle, and the invariants of the method."""

import pytest
import torch
from op_testing import (
    DTYPES,
    HEADS_AND_LAYOUTS,
    Shape,
    assert_same_on_threads,
    compare_with_oracle,
    make_qkv,
    recall_text,
    settings_text,
)

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

S = 32
SIZES = {"chunk_size": S, "local_window": 8, "heavy_budget": 8}
NO_RECALL = (None,) * 3
OPTIONS = [{}, {"sink_tokens": 3}, {"dense_tail": 40}, {"gqa_reduce": "max"}]
WIDE = {"wide": "1.0x3"}
WIDENING = {"error_rows": 4, "error_threshold": 0.01, "max_widen": 4}
OPERATORS = (ops.chunked_sparse_attention, oracle.chunked_sparse_attention)


def call(q, k, v, scores=None, memory=None, errors=None, recall=NO_RECALL, last=0, **fields):
    """The arguments of a call."""
    settings = settings_text(**(SIZES | fields))
    return (q, k, v, scores, memory, *recall, last, settings, None, None, 0.0, errors)


def prefill(*arguments, **fields):
    return ops.chunked_sparse_attention(*call(*arguments, **fields))


def check(*arguments, **fields):
    # The oracle decides ties of its own float64 scores: sets are compared by what they lead to.
    return compare_with_oracle(*OPERATORS, *call(*arguments, **fields))


def find_recalled(batch, past, tokens, device, chunk_size):
    ids = torch.randint(0, 9, (batch, past + tokens), generator=torch.Generator().manual_seed(5))
    lists = ops.lexical_recall(ids, past, recall_text(chunk_size, 3))
    return [x.to(device) for x in lists]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("heads", "layout"), HEADS_AND_LAYOUTS, ids=str)
def test_agrees_with_the_oracle(device, dtype, heads, layout):
    check(*make_qkv(Shape(2, *heads, 150, 32, 48), dtype, device, layout))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("past", [0, 45])
def test_head_dims_of_latent_attention(device, dtype, past):
    """DeepSeek V2 and V3 have keys of 192 and values of 128."""
    q, k, v = make_qkv(Shape(1, 2, 2, 150, 192, 128), dtype, device, "transposed", past=past)
    check(q, k, v, dense_tail=20)
    check(q, k, v, recall=find_recalled(1, past, 150, device, 48), chunk_size=48)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("sinks", "softcap"), [(False, 0.0), (True, 4.0)])
def test_budgets_grow_where_errors_are_large(device, dtype, sinks, softcap):
    """Threshold 0.01 lies far from the errors of these heads: the first has none."""
    q, k, v = make_qkv(Shape(2, 6, 2, 5 * S + 3, 16, 16), dtype, device)
    v[:, 0] = 1.0  # whatever the head attends to, the output is the same
    arguments = call(q, k, v, **WIDENING, **WIDE, sink_tokens=3)[:10]
    logits = {"sinks": torch.randn(6, device=device) if sinks else None, "softcap": softcap}
    if sinks:  # they have no value, so they make errors of their own
        v[:, 0] = 0.0
    *_, memory, errors = compare_with_oracle(*OPERATORS, *arguments, **logits)
    assert errors[..., 0].tolist() == [[0, 2]] * 2
    assert errors[..., 2:].tolist() == [[[5, 5], [5, 1 + 2 + 3 * 4]]] * 2
    assert (memory >= 0).sum(-1).tolist() == [[3 + 3 * 16, 3 + 4 * 16]] * 2


def test_a_head_has_the_budgets_of_its_factor_and_its_widening(device):
    q, k, v = make_qkv(Shape(1, 4, 2, 6 * S, 16, 16), device=device)
    errors = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 0]]], device=device)
    options = {**WIDENING, **WIDE, "error_threshold": 1e9}
    out, _, memory, after = check(q, k, v, errors=errors, **options)
    assert torch.equal(after[..., 0], errors[..., 0])
    assert (memory >= 0).sum(-1).tolist() == [[2 * 3 * 16, 16]]
    for head, factor in enumerate((6, 1)):
        rows = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        alone = (q[:, rows[0]], k[:, rows[1]], v[:, rows[1]])
        one = prefill(*alone, local_window=8 * factor, heavy_budget=8 * factor)
        torch.testing.assert_close(out[:, rows[0]], one[0], rtol=0, atol=1e-6)


# Of a dense tail each call has one.
@pytest.mark.parametrize(
    "options", [*(x for x in OPTIONS if "dense_tail" not in x), WIDE, WIDENING], ids=str
)
def test_calls_in_multiples_of_the_chunk_equal_one_call(device, options):
    q, k, v = make_qkv(Shape(1, 4, 2, 7 * S + 5, 16, 16), device=device)
    whole = prefill(q, k, v, **options)
    state, begin, last, outs = (), 0, 0, []
    for end in (2 * S, 3 * S, 6 * S, 7 * S + 5):
        history = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
        out, *state = prefill(*history, *state, last=last, **options)
        last = begin + (end - begin - 1) // S * S
        outs.append(out)
        begin = end
    assert torch.equal(torch.cat(outs, 2), whole[0])
    assert all(map(torch.equal, state, whole[1:]))


def test_one_chunk_is_phase_one_bit_by_bit(device):
    q, k, v = make_qkv(Shape(1, 4, 2, S, 32, 32), device=device)
    out, scores, memory, _ = prefill(q, k, v)
    alone = ops.intra_chunk_attention(q, k, v, S)
    assert torch.equal(out, alone[0]) and torch.equal(scores, alone[2]) and (memory == -1).all()


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_more_threads_than_tasks_give_the_same_bits(device, reduce):
    """Tasks are cut by query heads, column sums by keys, also where keys are recalled."""
    q, k, v = make_qkv(Shape(1, 6, 2, 1300, 32, 32), device=device)
    fields = {"chunk_size": 608, "local_window": 300, "heavy_budget": 300, "gqa_reduce": reduce}
    recall = find_recalled(1, 0, 1300, device, fields["chunk_size"])
    assert_same_on_threads(lambda: prefill(q, k, v, recall=recall, **fields), (1, 40))


def test_sixteen_chunks_of_extreme_logits_stay_finite(device):
    q, k, v = make_qkv(Shape(1, 2, 1, 16 * S, 16, 16), device=device)
    scale = 100 / (q @ k.transpose(-1, -2)).abs().max().item()
    out, scores, *_ = compare_with_oracle(*OPERATORS, *call(q, k, v)[:10], scale=scale)
    assert torch.isfinite(out).all() and torch.isfinite(scores).all()
