"""The module: eager, scripted, copied."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import h2o_prefill
from h2o_prefill import ChunkedSparseAttention, PrefillConfig, ops
from h2o_prefill.testing import Shape, make_qkv

CONFIG = PrefillConfig(chunk_size=32, local_window=8, heavy_budget=8, sink_tokens=2)


def run(attention, q, k, v):
    """Two calls of one prompt."""
    out_a, scores, memory = attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    begin = attention.next_chunk_begin(0, 64)
    out_b, scores, memory = attention(q[:, :, 64:], k, v, scores, memory, begin)
    return torch.cat([out_a, out_b], 2), scores, memory


@pytest.fixture
def qkv():
    return make_qkv(Shape(1, 4, 2, 150, 16, 16))


def test_is_the_operator(qkv):
    expected = ops.chunked_sparse_attention(*qkv, *(None,) * 5, 0, 32, 8, 8, 2)
    for a, e in zip(run(ChunkedSparseAttention(CONFIG), *qkv), expected, strict=True):
        assert torch.equal(a, e)


def save_and_load(attention):
    buffer = io.BytesIO()
    torch.save(attention, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [torch.jit.script, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load],
    ids=["script", "deepcopy", "pickle", "save"],
)
def test_copies_and_scripts_agree(qkv, again):
    attention = ChunkedSparseAttention(CONFIG)
    for a, e in zip(run(again(attention), *qkv), run(attention, *qkv), strict=True):
        assert torch.equal(a, e)


def test_import_brings_no_transformers():
    code = "import sys, h2o_prefill; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist():
    assert set(h2o_prefill.__all__) <= set(dir(h2o_prefill))
    for name in h2o_prefill.__all__:
        assert getattr(h2o_prefill, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = h2o_prefill.nonsense
