"""The module, eager, scripted and copied; and the names of the package."""

import copy
import pickle
import random
import warnings
from functools import partial

import pytest
import torch
from op_testing import Shape, make_qkv, saved_and_loaded
from random_calls.draw import Draw, draw_settings

import h2o_prefill
from h2o_prefill import ChunkedSparseAttention, PrefillConfig, ops
from h2o_prefill.functional import NO_RECALL

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


RECALLING = CONFIG.replace(recall=3, wide=((1, 4),))
TOKEN_TEXT = torch.tensor([[97, 98], [99, 0], [98, 99], [97, 0]], dtype=torch.int32)


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.filterwarnings("ignore:the memory set")
def test_it_is_the_operator_with_any_settings(qkv, seed, scripted):
    config = draw_settings(Draw(random.Random(seed)), 150, layers=2, kv_heads=2)
    ids = torch.randint(0, 4, (1, 150), generator=torch.Generator().manual_seed(1))
    lists = ops.lexical_recall(ids, 0, config, TOKEN_TEXT) if config.recall else NO_RECALL
    attention = ChunkedSparseAttention(config, TOKEN_TEXT)
    module = torch.jit.script(attention) if scripted else attention
    for layer in (0, 1):
        expected = ops.prefill_attention(*qkv, None, None, *lists, 0, layer, config)
        assert torch.equal(module(*qkv, token_ids=ids, layer=layer)[0], expected[0])
        if config.recall:
            assert torch.equal(module(*qkv, recall=lists, layer=layer)[0], expected[0])


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
