"""Sparse prefill of keys and values in pages, against contiguous ones to the bit."""

from itertools import pairwise

import pytest
import torch
from op_testing import PAGE_LAYOUTS, NoWaits, Shape, in_pages, make_qkv, settings_text

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.functional import NO_RECALL, paged_sparse_attention_
from h2o_prefill.state import LayerState

S, LENGTH = 32, 5 * 32 + 7
SETTINGS = settings_text(
    chunk_size=S, local_window=6, heavy_budget=6, error_rows=4, error_threshold=0.01, recall=2
)
TOKENS = torch.randint(0, 9, (1, LENGTH), generator=torch.Generator().manual_seed(0))
SHAPE = Shape(1, 4, 2, LENGTH, 64, 40)


def attend(qkv, size, layout, begin, end, state=None, settings=SETTINGS, dtype=torch.int64):
    """Return the rows of a call from its queries [T, Hq, D] in one tensor with others' heads."""
    q, k, v = (x[:, :, :end] for x in qkv)
    pages, table = in_pages(k, v, size, layout)
    heads = q[0, :, begin:].transpose(0, 1).repeat(1, 2, 1)[:, : SHAPE.query_heads]
    out = heads.new_full((end - begin, 2 * SHAPE.query_heads, SHAPE.value_dim), torch.nan)
    out = out[:, 1::2]
    lists = NO_RECALL
    if PrefillConfig.parse(settings).recall:
        lists = ops.lexical_recall(TOKENS[:, :end], begin, settings)
    rows = [x.transpose(0, 1)[None] for x in (heads, out)]
    count = -(-(end - begin) // S)
    options = state, 1, settings, count, lists
    states = paged_sparse_attention_(rows[0], pages, table.to(dtype), end, rows[1], *options)
    return rows[1], states


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
@pytest.mark.parametrize("size", [16, 48, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_and_states_give_what_one_call_gives(device, layout, size, dtype):
    qkv = make_qkv(SHAPE, dtype, device)
    state, lists = LayerState(True), ops.lexical_recall(TOKENS, 0, SETTINGS)
    expected = state.attend_history(*qkv, 1, SETTINGS, None, None, 0.0, *lists)
    out, states = attend(qkv, size, layout, 0, LENGTH)
    assert out.equal(expected)
    for i in reversed(range(5)):
        state.truncate((i + 1) * S)
        for x, y in zip(states, state.checkpoint(1, SETTINGS), strict=True):
            width = y.shape[2]
            assert x[i][..., :width].equal(y) and (x[i][..., width:] <= 0).all()
    for i, end in (0, 4 * S), (2, LENGTH), (4, LENGTH):
        begin = (i + 1) * S
        before = [x[i] for x in states]
        part, _ = attend(qkv, size, layout, begin, end, before, dtype=torch.int32)
        assert part.equal(expected[:, :, begin:end])


def test_states_inside_of_chunks(device):
    qkv, middle = make_qkv(SHAPE, device=device), 2 * S + 9
    state, outs = LayerState(), []
    for begin, end in (0, middle), (middle, LENGTH):
        lists = ops.lexical_recall(TOKENS[:, :end], begin, SETTINGS)
        call = qkv[0][:, :, begin:end], *(x[:, :, :end] for x in qkv[1:])
        outs.append(state.attend_history(*call, 1, SETTINGS, None, None, 0.0, *lists))
    first, states = attend(qkv, 16, "LBNHC", 0, middle)
    last, _ = attend(qkv, 16, "LBNHC", middle, LENGTH, [x[-1] for x in states])
    assert first.equal(outs[0]) and last.equal(outs[1])


@pytest.mark.parametrize("settings", [f"exact,chunk_size={S}", f"{SETTINGS},dense_layers=1"])
def test_dense_calls_go_by_chunks_and_have_no_states(device, settings):
    q, k, v = make_qkv(SHAPE, device=device)
    out, states = attend((q, k, v), 16, "BLHNC", S, LENGTH, settings=settings)
    for begin, end in pairwise([*range(S, LENGTH, S), LENGTH]):
        chunk = q[:, :, begin:end], *(x[:, :, :end] for x in (k, v))
        assert out[:, :, begin - S : end - S].equal(ops.dense_attention(*chunk))
    assert [x.shape[:3] for x in states] == [(0, 1, 2)] * 3


def test_nothing_waits_for_the_device(device):
    q, k, v = make_qkv(SHAPE, torch.bfloat16, device)
    pages, table = in_pages(k, v, 16)
    out, recall = torch.empty_like(v).repeat(1, 2, 1, 1), ops.lexical_recall(TOKENS, 0, SETTINGS)
    arguments = q, *pages, table, LENGTH, out, None, None, None, *recall, 1, SETTINGS, 5
    # Past the dispatcher, so that the mode sees the operators that this one calls.
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    with NoWaits():
        torch.ops.h2o_prefill.paged_sparse_attention_.default.redispatch(key, *arguments)
