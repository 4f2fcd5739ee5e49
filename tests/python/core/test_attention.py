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
from h2o_prefill.state import LayerState

CONFIG = PrefillConfig(chunk_size=32, local_window=8, heavy_budget=8, sink_tokens=2)
RECALLING = CONFIG.replace(recall=3)
TOKEN_TEXT = torch.tensor([[97, 98], [99, 0], [98, 99], [97, 0]], dtype=torch.int32)


@pytest.fixture
def qkv():
    return make_qkv(Shape(1, 4, 2, 150, 16, 16))


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.filterwarnings("ignore:the memory set")
def test_it_attends_with_any_settings(qkv, seed, scripted):
    config = draw_settings(Draw(random.Random(seed)), 150, layers=2)
    ids = torch.randint(0, 4, (1, 150), generator=torch.Generator().manual_seed(1))
    lists = ops.lexical_recall(ids, 0, config, TOKEN_TEXT) if config.recall else NO_RECALL
    attention = ChunkedSparseAttention(config, TOKEN_TEXT)
    module = torch.jit.script(attention) if scripted else attention
    for layer in (0, 1):
        options = layer, config.to_string(), None, None, 0.0, *lists
        expected = LayerState().attend_history(*qkv, *options)
        assert torch.equal(module(*qkv, token_ids=ids, layer=layer), expected)
        if config.recall:
            assert torch.equal(module(*qkv, recall=lists, layer=layer), expected)


def test_recall_without_ids_warns_once(qkv):
    attention = ChunkedSparseAttention(RECALLING)
    with pytest.warns(UserWarning, match="recall is off: a sparse call without token ids") as seen:
        first = attention(*qkv)
        second = attention(*qkv)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert torch.equal(first, second)
    assert torch.equal(first, ChunkedSparseAttention(CONFIG)(*qkv))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q, k, v = qkv
        ChunkedSparseAttention(RECALLING)(q[:, :, -1:], k, v)  # decoding
    with pytest.warns(UserWarning, match="recall is off: a sparse call without token ids"):
        torch.jit.script(ChunkedSparseAttention(RECALLING))(*qkv)


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda m: saved_and_loaded(torch.jit.script(m), torch.jit),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        partial(saved_and_loaded, weights_only=False),
    ],
    ids=["script", "deepcopy", "pickle", "save"],
)
def test_copies_and_scripts_agree(qkv, duplicate):
    def run(attention):
        state, (q, k, v) = LayerState(), qkv
        first = attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], state)
        return first, attention(q[:, :, 64:], k, v, state), state.scores, state.memory

    attention = ChunkedSparseAttention(CONFIG)
    for x, expected in zip(run(duplicate(attention)), run(attention), strict=True):
        assert torch.equal(x, expected)


def test_public_names_exist():
    assert set(h2o_prefill.__all__) <= set(dir(h2o_prefill))
    for name in h2o_prefill.__all__:
        assert getattr(h2o_prefill, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = h2o_prefill.nonsense
