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
    tracker = MemorySetTracker(**size, local_window=256, heavy_hitter_budget=256)
    extra = tracker.scores.scores.nbytes + tracker.memory.nbytes
    assert extra < 0.05 * cache.buffer.nbytes


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 160])
def test_chunks_tile_the_call(num_tokens, begin):
    """Index bounds: no out-of-bounds access (N = 0, 1, S - 1, S, S + 1, 2S - 1, 2S + 128)."""
    chunks = ChunkManager(16, num_tokens, begin)
    covered = [position for start, end in chunks for position in range(start, end)]
    assert covered == list(range(begin, begin + num_tokens))
    assert all(end - start == 16 for start, end in list(chunks)[:-1])
    assert len(chunks) == len(list(chunks))
    for outside in (-1, len(chunks)):
        with pytest.raises(IndexError, match="chunk_idx must be in"):
            chunks[outside]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "chunk_size must be >= 1, got 0"),
        ((4, -1), "num_tokens must be >= 0, got -1"),
        ((4, 4, -2), "begin must be >= 0, got -2"),
    ],
)
def test_chunk_manager_names_the_wrong_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChunkManager(*arguments)


def test_memory_is_built_when_the_next_chunk_arrives():
    tracker = MemorySetTracker(1, 1, 16, local_window=1, heavy_hitter_budget=1)
    assert tracker.begin_chunk(0, 0) is None
    assert (tracker.memory == -1).all()
    tracker.scores.set_initial_scores(0, 0, 4, torch.tensor([[[1.0, 3.0, 2.0, 9.0]]]))
    assert tracker.begin_chunk(0, 4).tolist() == [[1, 3]]
    assert tracker.last_chunk_begin == [4]


def test_reset_forgets_everything():
    tracker = MemorySetTracker(2, 2, 16, local_window=2, heavy_hitter_budget=2, sink_tokens=1)
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
