"""Wrong arguments of the C++ classes: refused with their names, and the state stays as it was."""

import re

import pytest
import torch
from op_testing import Shape, make_qkv

from h2o_prefill import PrefillConfig

classes = torch.classes.h2o_prefill
Q, K, V = make_qkv(Shape(2, 4, 2, 40, 8, 16), layout="contiguous")
ROW = torch.tensor([[[1.0, 2.0, 3.0]]])
SET = torch.tensor([[[0, 1, -1]]], dtype=torch.int32)
IDS = torch.zeros(2, 40, dtype=torch.int64)
FIVE = [x[:, :, :5] for x in (Q, K, V)]
Cache, Tracker, Context = classes.ChunkedKVCache, classes.MemorySetTracker, classes.PrefillContext


def config(**changes):
    return PrefillConfig(16, local_window=3, heavy_budget=4, sink_tokens=1, **changes).native


def cache():
    made = Cache(2, 8, 70)
    made.append(0, K, V)
    return made


def tracker(layers=4):
    made = Tracker(layers, 1, 2, 0)
    made.init_chunk_scores(0, 0, ROW)
    return made


def scored():
    made = Tracker(2, 3, 4, 1)
    made.init_chunk_scores(1, 0, torch.ones(2, 2, 40))
    return made


def context():
    made = Context(2, 50, config())
    made.begin(IDS)
    for layer in (0, 1):
        made.attend(layer, Q, K, V)
    made.begin(IDS[:, :5])
    return made


def attend(cache, *qkv, layer=0, tracker=None):
    tracker = Tracker(2, 3, 4, 1) if tracker is None else tracker
    classes.ChunkedSparseAttention(config()).forward(layer, *qkv, cache, tracker)


def build(made, change):
    """Build a state from the tensors of another, of which some are changed, or left out: None."""
    tensors = made.state_tensors()
    changed = {index % len(tensors): tensor for index, tensor in change.items()}
    tensors = [changed.get(i, tensor) for i, tensor in enumerate(tensors)]
    getattr(classes, made._type().name()).from_tensors([x for x in tensors if x is not None])


GRAD = K.clone().requires_grad_()
NOTHING = [
    (lambda: classes.ChunkManager(-1, 8, 8), "past must be >= 0, got -1"),
    (lambda: classes.ChunkManager(0, -8, 8), "num_tokens must be >= 0, got -8"),
    (lambda: classes.ChunkManager(0, 8, 0), "chunk_size must be >= 1, got 0"),
    (lambda: classes.ChunkManager(4, 17, 8).begin(3), "chunk must be in [0, 3), got 3"),
    (lambda: classes.ChunkManager(4, 17, 8).end(-1), "chunk must be in [0, 3), got -1"),
    (lambda: Cache(0, 8, 16), "num_layers must be >= 1, got 0"),
    (lambda: Cache(1, 32, 16), "max_capacity must be >= initial_capacity (32), got 16"),
    (lambda: Cache.from_tensors([K]), "tensors must begin with an int64 header"),
    (lambda: Tracker(0, 1, 1, 0), "num_layers must be >= 1, got 0"),
    (lambda: Tracker(1, 1, 1, -1), "sink_tokens must be >= 0, got -1"),
    (lambda: Context(2, 0, config()), "max_tokens must be >= 1, got 0"),
    (lambda: Context(1, 8, config(dense_layers=[1])), "dense_layers must name layers < 1, the"),
    (lambda: Context.from_tensors([]), "tensors must begin with an int64"),
]
OF_CACHE = [
    (lambda x: x.append(7, K, V), "layer must be in [0, 2), got 7"),
    (lambda x: x.key(1), "layer must hold tokens, layer 1 has none"),
    (lambda x: x.truncate(-1), "length must be >= 0, got -1"),
    (lambda x: x.append(0, K[..., :4], V), "key must be like "),
    (lambda x: x.append(0, K, V[..., :4]), "value must be like "),
    (lambda x: x.append(0, K.double(), V.double()), "got [2, 2, 40, 8] float64 on cpu"),
    (lambda x: x.append(1, K, V[:, :, 1:]), "value must have batch, heads and length of key [2,"),
    (lambda x: x.append(1, K, V.double()), "value must have dtype and device of key"),
    (lambda x: x.append(1, K[0], V), "key must have 4 dimensions, got shape [2, 40, 8]"),
    (lambda x: x.append(0, GRAD, V), "key must not require a gradient"),
    (lambda x: build(x, {-1: None}), "tensors must hold "),
    (lambda x: attend(x, Q, K, V), "max_capacity must be >= 80, the tokens "),
    (lambda x: attend(x, Q, K, V, layer=7), "layer must be in [0, 2), got 7"),
    (lambda x: attend(x, Q[0], K, V, layer=1), "query must have 4 dimensions, got shape [4, 40, 8"),
    (lambda x: attend(x, Q[:, 1:], K, V, layer=1), "the query heads must be a multiple of the KV"),
    (
        lambda x: attend(x, Q, K, V, layer=1, tracker=scored()),
        "tracker must belong to the prompt of",
    ),
    (lambda x: attend(x, Q, K, V, tracker=tracker()), "tracker must have the layers of cache (2),"),
    (
        lambda x: attend(x, Q, K, V, tracker=tracker(2)),
        "tracker must have local_window, heavy_budg",
    ),
]
OF_TRACKER = [
    (lambda x: x.scores(7), "layer must be in [0, 4), got 7"),
    (lambda x: x.indices(2), "layer must have scores, layer 2 has none"),
    (lambda x: x.init_chunk_scores(1, -1, ROW), "chunk_begin must be >= 0, got -1"),
    (lambda x: x.init_chunk_scores(1, 0, ROW[0]), "colsum must have 3 dimensions, got shape [1, 3"),
    (
        lambda x: x.init_chunk_scores(1, 0, ROW.half()),
        "colsum must be float32 or float64, got floa",
    ),
    (lambda x: x.init_chunk_scores(0, 2, ROW), "chunk_begin must be >= 3, got 2"),
    (lambda x: x.init_chunk_scores(0, 3, torch.ones(1, 2, 1)), "have batch and heads of scores"),
    (lambda x: x.build_memory_set(0, 2), "chunk_end must be >= 3, got 2"),
    (lambda x: x.accumulate_memory_scores(0, ROW[..., :1]), "have the shape of the memory set [1,"),
    (lambda x: x.update(0, ROW, SET, 4), "last_chunk_begin must be in [0, 3], got 4"),
    (lambda x: x.update(0, ROW, SET[..., :2], 0), "memory must have room for K + L + H positions"),
    (lambda x: build(x, {-1: None}), "tensors must hold "),
    (lambda x: build(tracker(1), {0: ROW}), "tensors must begin with an int64 header"),
    (lambda x: build(tracker(1), {-3: SET}), "scores must be float32"),
    (lambda x: build(tracker(1), {-1: torch.zeros(4)}), "errors must have 3 dimensions, got"),
]
OF_CONTEXT = [
    (lambda x: x.begin(IDS[0]), "token_ids must have 2 dimensions, got shape [40]"),
    (lambda x: x.begin(IDS), "max_tokens must be >= 80, the tokens after this call, got 50"),
    (lambda x: x.begin(IDS[:1, :5]), "token_ids must have the batch size of the prompt (2), got 1"),
    (lambda x: x.begin_without_ids(1, -5), "total_tokens must be in [41, 50], got -5"),
    (lambda x: x.attend(2, Q, K, V), "layer must be in [0, 2), got 2"),
    (
        lambda x: x.attend(0, Q[:, :, 1:], K, V),
        "query must have the tokens that the call began with",
    ),
    (lambda x: x.attend(0, *FIVE, None, 0), "window must be >= 1"),
    (
        lambda x: x.attend(0, *(t[1:] for t in FIVE)),
        "query must have the batch size of the token id",
    ),
    (lambda x: x.truncate(-1), "length must be >= 0, got -1"),
    (lambda x: x.checkpoint_before(-1), "length must be >= 0"),
    (lambda x: build(x, {2: IDS[:, :3]}), "tensors[2] must hold the ids of 2 rows and"),
    (lambda x: build(x, {1: IDS[0, :1].byte().expand(2**33)}), "bytes of tensors[1] must"),
]


@pytest.mark.parametrize(("call", "message"), NOTHING)
def test_what_cannot_be_made(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (make, *row)
        for make, rows in ((cache, OF_CACHE), (tracker, OF_TRACKER), (context, OF_CONTEXT))
        for row in rows
    ],
)
def test_a_refused_call_changes_nothing(make, call, message):
    state, untouched = make(), make()
    with pytest.raises(ValueError, match=re.escape(message)):
        call(state)
    for tensor, expected in zip(state.state_tensors(), untouched.state_tensors(), strict=True):
        assert torch.equal(tensor, expected)
