"""Sparse prefill of keys and values in pages, against contiguous ones to the bit."""

import itertools

import pytest
import torch
from op_testing import PAGE_LAYOUTS, NoWaits, Shape, in_pages, make_qkv

from h2o_prefill import ops
from h2o_prefill.state import LayerState

OP = torch.ops.h2o_prefill.paged_sparse_attention_
NONE = (None, None, None)
S, LENGTH = 32, 5 * 32 + 7
SIZES = f"chunk_size={S},local_window=6,heavy_budget=6,error_rows=4,error_threshold=0.01"
SETTINGS = f"h2o,{SIZES},recall=2"
TOKENS = torch.randint(0, 9, (1, LENGTH), generator=torch.Generator().manual_seed(0))
SHAPE = Shape(1, 4, 2, LENGTH, 64, 40)


def recall_of(begin, end):
    return ops.lexical_recall(TOKENS[:, :end], begin, SETTINGS)


def attend(q, pages, table, begin, end, state=NONE, settings=SETTINGS):
    """Return rows, written into a part of [T, Hq, any], and the checkpoints of all chunk ends."""
    recall = recall_of(begin, end) if settings == SETTINGS else NONE
    wide = q.new_full((end - begin, 4, 50), torch.nan)
    out = wide[..., 2:42].transpose(0, 1)[None]
    options = *state, *recall, 1, settings, -(-(end - begin) // S)
    return out, OP(q[:, :, begin:end], *pages, table, end, out, *options)


PAGES = itertools.cycle([(16, "float32"), (48, "bfloat16"), (1024, "bfloat16")])


@pytest.mark.parametrize(("layout", "page"), zip(PAGE_LAYOUTS, PAGES, strict=False))
def test_pages_and_checkpoints_give_what_one_call_gives(device, layout, page):
    size, dtype = page
    q, k, v = make_qkv(SHAPE, getattr(torch, dtype), device)
    state, options = LayerState(True), (1, SETTINGS, None, None, 0.0, *recall_of(0, LENGTH))
    expected = state.attend_history(q, k, v, *options)
    pages, table = in_pages(k, v, size, layout)
    out, states = attend(q, pages, table, 0, LENGTH)
    assert out.equal(expected)
    for i, end in (4, LENGTH), (2, LENGTH), (0, 4 * S):
        begin, before = (i + 1) * S, [x[i] for x in states]
        state.truncate(begin)
        for x, y in zip(before, state.checkpoint(1, SETTINGS), strict=True):
            width = y.shape[2]
            assert x[..., :width].equal(y) and (x[..., width:] <= 0).all()
        part, _ = attend(q, pages, table.int(), begin, end, before)
        assert part.equal(expected[:, :, begin:end])


def test_the_last_checkpoint_may_be_inside_of_a_chunk(device):
    (q, k, v), middle = make_qkv(SHAPE, device=device), 2 * S + 9
    paged, state, before = in_pages(k, v, 16), LayerState(), NONE
    for begin, end in (0, middle), (middle, LENGTH):
        call = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
        options = 1, SETTINGS, None, None, 0.0, *recall_of(begin, end)
        out, states = attend(q, *paged, begin, end, before)
        assert out.equal(state.attend_history(*call, *options))
        before = [x[-1] for x in states]


@pytest.mark.parametrize("settings", [f"exact,chunk_size={S}", f"h2o,{SIZES},dense_layers=1"])
def test_dense_calls_go_by_chunks_and_have_no_checkpoints(device, settings):
    q, k, v = make_qkv(SHAPE, device=device)
    out, states = attend(q, *in_pages(k, v, 16), S, LENGTH, settings=settings)
    for begin, end in itertools.pairwise([*range(S, LENGTH, S), LENGTH]):
        chunk = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
        assert out[:, :, begin - S : end - S].equal(ops.dense_attention(*chunk))
    assert [len(x) for x in states] == [0, 0, 0]


def test_nothing_waits_for_the_device(device):
    q, k, v = make_qkv(SHAPE, torch.bfloat16, device)
    pages, table = in_pages(k, v, 16)
    out, recall = torch.empty_like(v).repeat(1, 2, 1, 1), recall_of(0, LENGTH)
    arguments = q, *pages, table, LENGTH, out, *NONE, *recall, 1, SETTINGS, 5
    # Past the dispatcher, so that the mode sees the operators that this one calls.
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    with NoWaits():
        OP.default.redispatch(key, *arguments)
