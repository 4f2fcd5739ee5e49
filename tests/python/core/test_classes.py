"""The C++ classes as Python and TorchScript see them, `torch.classes.h2o_prefill`."""

import copy
import dataclasses
import pickle

import pytest
import torch
from op_testing import Shape, make_qkv, saved_and_loaded, settings_text
from torch import nn

import h2o_prefill
from h2o_prefill import ops

classes = torch.classes.h2o_prefill
SETTINGS = {"chunk_size": 16, "local_window": 3, "heavy_budget": 4, "sink_tokens": 1}
LAYERS = 2


COPIES = pytest.mark.parametrize(
    "duplicate",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: saved_and_loaded(x, weights_only=False),
    ],
    ids=["pickle", "deepcopy", "torch.save"],
)


def random_qkv(tokens):
    return make_qkv(Shape(1, 4, 2, tokens, 8, 8), layout="contiguous")


def make_attention(**settings):
    return classes.ChunkedSparseAttention(classes.PrefillConfig(**(SETTINGS | settings)))


def make_state():
    return classes.ChunkedKVCache(LAYERS, 8, 128), classes.MemorySetTracker(LAYERS, 3, 4, 1)


def run_op(qkv, recall=(None,) * 3, **fields):
    settings = settings_text(**(SETTINGS | fields))
    return ops.chunked_sparse_attention(*qkv, None, None, *recall, 0, settings)


DEFAULTS = dataclasses.asdict(h2o_prefill.PrefillConfig())

# Every field with another value than the default: numbers that are one larger, but for these.
CHANGED = {
    name: True if x is False else x + 1
    for name, x in DEFAULTS.items()
    if type(x) in (bool, int, float)
}
CHANGED |= SETTINGS | {"dense_layers": [7, 8]}
CHANGED |= {"gqa_reduce": "max", "min_prefill": 9}


@COPIES
def test_config_copies_whole(duplicate):
    config = classes.PrefillConfig(**CHANGED)
    assert duplicate(config).to_fields() == config.to_fields()
    assert duplicate(classes.PrefillConfig()).min_prefill is None
    copied = duplicate(classes.ChunkedSparseAttention(config)).config()
    assert copied.to_fields() == config.to_fields()
    chunks = duplicate(classes.ChunkManager(5, 17, 8))
    assert (chunks.past(), chunks.num_tokens(), chunks.chunk_size()) == (5, 17, 8)


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 17])
@pytest.mark.parametrize("size", [1, 8, 2**63 - 1])
def test_chunks_tile_a_call(past, tokens, size):
    chunks = classes.ChunkManager(past, tokens, size)
    begins = list(range(past, past + tokens, size))
    assert [chunks.begin(i) for i in range(chunks.num_chunks())] == begins
    ends = [*begins[1:], past + tokens][: len(begins)]
    assert [chunks.end(i) for i in range(chunks.num_chunks())] == ends
    assert chunks.last_chunk_begin() == (begins[-1] if begins else past)


def test_a_cache_grows_by_doubling_up_to_its_limit():
    _, k, v = random_qkv(100)
    cache, begin = classes.ChunkedKVCache(1, 8, 50), 0
    # The fourth call needs more than twice as much, and twice as much would pass the limit in the
    # fifth.
    for end, capacity in ((3, 8), (8, 8), (9, 16), (33, 33), (34, 50), (50, 50)):
        cache.append(0, k[:, :, begin:end], v[:, :, begin:end])
        assert cache.capacity(0) == capacity
        begin = end
    assert torch.equal(cache.key(0), k[:, :, :50])
    buffer = cache.key(0).data_ptr()
    cache.reset()
    cache.append(0, k[:, :, :8], v[:, :, :8])
    assert cache.key(0).data_ptr() == buffer, "a prompt that is alike has the same buffers"


def test_a_worked_example_of_memory_sets():
    tracker = classes.MemorySetTracker(1, 1, 2, 0)  # a local window of 1, 2 heavy hitters

    def row(*values):
        return torch.tensor([[values]]).float()

    colsum = row(5, 1, 3, 2)
    tracker.init_chunk_scores(0, 0, colsum)
    assert tracker.indices(0).tolist() == [[[-1, -1, -1]]]
    for _ in range(2):
        assert tracker.build_memory_set(0, 4).tolist() == [[[0, 2, 3]]]
    tracker.init_chunk_scores(0, 4, row(4, 1, 1, 6))
    tracker.accumulate_memory_scores(0, row(1, 2, 3))
    assert torch.equal(tracker.scores(0), row(6, 1, 5, 5, 4, 1, 1, 6))
    assert torch.equal(colsum, row(5, 1, 3, 2)), "the caller's tensors stay"
    # Candidates are {0, 2, 3} and [4, 8): position 1 left and does not return. Of 2 and 3 the
    # lower wins.
    assert tracker.build_memory_set(0, 8).tolist() == [[[0, 2, 7]]]
    tracker.truncate(7)  # the set was for a chunk that never begins
    assert tracker.indices(0).tolist() == [[[0, 2, -1]]]


class Prefill(nn.Module):
    """Settings are an attribute; the state is made inside."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = make_attention(**settings)

    def forward(self, q, k, v):
        config = self.attention.config()
        cache = torch.classes.h2o_prefill.ChunkedKVCache(1, 64, 1024)
        tracker = torch.classes.h2o_prefill.MemorySetTracker(
            1, config.local_window, config.heavy_budget, config.sink_tokens
        )
        out = self.attention.forward(0, q, k, v, cache, tracker)
        return out, tracker.scores(0), cache.length(0)


def test_scripted_module_is_saved_with_the_classes():
    loaded = saved_and_loaded(torch.jit.script(Prefill()), torch.jit)
    qkv = random_qkv(70)
    out, scores, *_ = run_op(qkv)
    for _ in range(2):  # with a new state each time
        got_out, got_scores, length = loaded(*qkv)
        assert torch.equal(got_out, out)
        assert torch.equal(got_scores, scores)
        assert length == 70
