"""The module, eager, scripted and copied; and the names of the package."""

import copy
import dataclasses
import pickle
import warnings
from functools import partial

import pytest
import torch
from op_testing import Shape, make_qkv, saved_and_loaded

import h2o_prefill
from h2o_prefill import ChunkedSparseAttention, PrefillConfig, ops
from h2o_prefill.functional import recall_lists, sparse_attention

CONFIG = PrefillConfig(chunk_size=32, local_window=8, heavy_budget=8, sink_tokens=2)


def run(attention, q, k, v):
    """Two calls of one prompt."""
    out_a, scores, memory, errors = attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    begin = attention.last_chunk_begin(0, 64)
    state = (scores, memory, begin)
    out_b, *state = attention(q[:, :, 64:], k, v, *state, errors=errors)
    return torch.cat([out_a, out_b], 2), *state


@pytest.fixture
def qkv():
    return make_qkv(Shape(1, 4, 2, 150, 16, 16))


RECALLING = CONFIG.replace(recall=3, recall_block=8, wide=((1, 4),))
TOKEN_TEXT = torch.tensor([[97, 98], [99, 0], [98, 99], [97, 0]], dtype=torch.int32)
BY_CHARACTERS = CONFIG.replace(recall=1, recall_block=8, recall_characters=2, recall_max_count=1)
EMPTY = {"sink_tokens": 0, "local_window": 0, "heavy_budget": 0}
# Settings, and a change that the module's output must show.
EVERY_FIELD = [
    (RECALLING, {"chunk_size": 64}),
    (CONFIG, {"local_window": 4}),
    (CONFIG, {"heavy_budget": 4}),
    (CONFIG, {"sink_tokens": 4}),
    (CONFIG, {"dense_tail": 20}),
    (CONFIG, {"dense_layers": (1,)}),
    (CONFIG, {"wide": ((1, 2),)}),
    (RECALLING, {"wide": ((1, 2),)}),
    (CONFIG, {"wide": ((1, 0, 3),)}),
    (RECALLING, {"wide": ((1, 4), (1, 0, 1))}),
    (CONFIG, {"error_rows": 4}),
    (CONFIG.replace(error_rows=4, error_threshold=1.0), {"error_threshold": 0.0}),
    (CONFIG.replace(error_rows=4), {"max_widen": 2}),
    (CONFIG, {"exact": True}),
    (CONFIG, {"gqa_reduce": "max"}),
    (CONFIG, {"min_prefill": 200}),
    (CONFIG.replace(recall_block=8), {"recall": 3}),
    (RECALLING, {"recall_block": 16}),
    (RECALLING, {"recall_suffix": 1}),
    (RECALLING, {"recall_span": 1}),
    (
        CONFIG.replace(recall=20, recall_block=8, recall_suffix=1, recall_max_count=1000),
        {"recall_max_count": 1},
    ),
    (EMPTY, {"block_diagonal": True}),
    (BY_CHARACTERS, {"recall_characters": 0}),
]


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize(
    ("base", "change"), EVERY_FIELD, ids=lambda x: "-".join(x) if type(x) is dict else ""
)
@pytest.mark.filterwarnings("ignore:the memory set is empty")
def test_every_field_counts(qkv, base, change, scripted):
    if base is EMPTY:
        base = CONFIG.replace(**EMPTY)
    ids = torch.randint(0, 4, (1, 150), generator=torch.Generator().manual_seed(1))
    outputs = []
    for config in (base, base.replace(**change)):
        attention = ChunkedSparseAttention(config, TOKEN_TEXT)
        module = torch.jit.script(attention) if scripted else attention
        outputs.append(module(*qkv, token_ids=ids, layer=1)[0])
    assert not torch.equal(*outputs)


def test_no_field_is_left_out():
    changed = {name for _, change in EVERY_FIELD for name in change}
    assert changed == {field.name for field in dataclasses.fields(PrefillConfig)}


def test_is_the_operator_with_every_setting_of_the_layer(qkv):
    config = RECALLING.replace(dense_layers=(0,), dense_tail=5, gqa_reduce="max")
    ids = torch.randint(0, 4, (1, 150), generator=torch.Generator().manual_seed(1))
    attention = ChunkedSparseAttention(config)
    expected, _ = sparse_attention(*qkv, None, config.of_layer(1), recall_lists(ids, 0, config))
    assert torch.equal(attention(*qkv, token_ids=ids, layer=1)[0], expected)
    found = attention.find_recalled(ids, 0)
    assert torch.equal(attention(*qkv, recall=found, layer=1)[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attention(*qkv, layer=0)[0], ops.dense_attention(*qkv))


def test_recall_without_ids_warns_once(qkv):
    attention = ChunkedSparseAttention(RECALLING)
    with pytest.warns(UserWarning, match="recall is off: a sparse call without token ids") as seen:
        first = attention(*qkv)
        second = attention(*qkv)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], ChunkedSparseAttention(RECALLING.replace(recall=0))(*qkv)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q, k, v = qkv
        ChunkedSparseAttention(RECALLING)(q[:, :, -1:], k, v)  # decoding
    with pytest.warns(UserWarning, match="recall is off: a sparse call without token ids"):
        torch.jit.script(ChunkedSparseAttention(RECALLING))(*qkv)


@pytest.mark.parametrize(
    "again",
    [
        torch.jit.script,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        partial(saved_and_loaded, weights_only=False),
    ],
    ids=["script", "deepcopy", "pickle", "save"],
)
def test_copies_and_scripts_agree(qkv, again):
    attention = ChunkedSparseAttention(CONFIG)
    for a, e in zip(run(again(attention), *qkv), run(attention, *qkv), strict=True):
        assert torch.equal(a, e)


def test_public_names_exist():
    assert set(h2o_prefill.__all__) <= set(dir(h2o_prefill))
    for name in h2o_prefill.__all__:
        assert getattr(h2o_prefill, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = h2o_prefill.nonsense
