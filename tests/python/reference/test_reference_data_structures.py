"""Task 1: cache, memory sets, chunks."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill.reference import ChunkedKVCache, ChunkManager, MemorySetTracker


def test_memory_layout_is_contiguous_with_head_dim_innermost():
    """Memory layout correctness: contiguous, cache-friendly."""
    cache = ChunkedKVCache(num_layers=3, num_heads=2, max_seq_len=32, head_dim=8)
    assert cache.buffer.shape == (3, 2, 2, 32, 8)
    assert cache.buffer.is_contiguous()
    head = cache.layer(1)[0, 1]
    assert head.is_contiguous() and head.stride() == (8, 1)


def test_access_is_a_view_and_never_a_copy():
    """Access pattern: O(1) index lookup."""
    cache = ChunkedKVCache(num_layers=2, num_heads=2, max_seq_len=16, head_dim=4)
    cache.layer(1)[0, 1, 5] = 7.0
    assert (cache.buffer[1, 0, 1, 5] == 7.0).all()
    stride_of_layer = cache.buffer.stride(0) * cache.buffer.element_size()
    assert cache.layer(1).data_ptr() == cache.buffer.data_ptr() + stride_of_layer


def test_state_beside_the_cache_is_below_five_percent_of_it():
    """Memory overhead: < 5% additional vs baseline (16-bit cache, fp32 scores, L = H = 256)."""
    size = {"num_layers": 2, "num_heads": 2, "max_seq_len": 4096}
    cache = ChunkedKVCache(**size, head_dim=64, dtype=torch.bfloat16)
    tracker = MemorySetTracker(**size, local_window=256, heavy_budget=256)
    extra = tracker.scores.scores.nbytes + tracker.memory.nbytes
    assert extra < 0.05 * cache.buffer.nbytes


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 160])
def test_chunks_tile_the_call(num_tokens, past):
    """Index bounds: no out-of-bounds access (N = 0, 1, S - 1, S, S + 1, 2S - 1, 2S + 128)."""
    chunks = ChunkManager(past, num_tokens, 16)
    bounds = [(chunks.begin(c), chunks.end(c)) for c in range(chunks.num_chunks())]
    covered = [position for begin, end in bounds for position in range(begin, end)]
    assert covered == list(range(past, past + num_tokens))
    assert all(end - begin == 16 for begin, end in bounds[:-1])
    assert chunks.last_chunk_begin() == (bounds[-1][0] if bounds else past)
    for outside in (-1, chunks.num_chunks()):
        with pytest.raises(ValueError, match="chunk must be in"):
            chunks.begin(outside)


def test_chunks_are_those_of_the_class_in_c_plus_plus():
    for past, num_tokens, chunk_size in [(0, 0, 4), (5, 17, 8), (3, 16, 16), (0, 1, 1)]:
        ours = ChunkManager(past, num_tokens, chunk_size)
        theirs = torch.classes.h2o_prefill.ChunkManager(past, num_tokens, chunk_size)
        assert ours.num_chunks() == theirs.num_chunks()
        assert ours.last_chunk_begin() == theirs.last_chunk_begin()
        for chunk in range(ours.num_chunks()):
            assert (ours.begin(chunk), ours.end(chunk)) == (theirs.begin(chunk), theirs.end(chunk))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0), "chunk_size must be >= 1, got 0"),
        ((0, -1, 4), "num_tokens must be >= 0, got -1"),
        ((-2, 4, 4), "past must be >= 0, got -2"),
    ],
)
def test_chunk_manager_names_the_wrong_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChunkManager(*arguments)


def test_memory_is_built_when_the_next_chunk_arrives():
    tracker = MemorySetTracker(1, 1, 16, local_window=1, heavy_budget=1)
    assert tracker.begin_chunk(0, 0) is None
    assert (tracker.memory == -1).all()
    tracker.scores.set_initial_scores(0, 0, 4, torch.tensor([[[1.0, 3.0, 2.0, 9.0]]]))
    assert tracker.begin_chunk(0, 4).tolist() == [[1, 3]]
    assert tracker.last_chunk_begin == [4]


def test_reset_forgets_everything():
    tracker = MemorySetTracker(2, 2, 16, local_window=2, heavy_budget=2, sink_tokens=1)
    cache = ChunkedKVCache(num_layers=2, num_heads=2, max_seq_len=16, head_dim=4)
    for layer in range(2):
        tracker.begin_chunk(layer, 0)
        tracker.scores.set_initial_scores(layer, 0, 8, torch.rand(2, 8, 8))
        memory = tracker.begin_chunk(layer, 8)
        tracker.scores.accumulate_scores(layer, memory, torch.rand(2, 4, 5))
    cache.layer(0).fill_(1.0)
    cache.length = 8
    tracker.reset()
    cache.reset()
    assert (tracker.memory == -1).all() and tracker.last_chunk_begin == [0, 0]
    assert (tracker.scores.scores == 0).all() and tracker.scores.num_updates == [0, 0]
    assert (cache.buffer == 0).all() and cache.length == 0
