"""The method in readable PyTorch: one file per task of its plan, and the oracle of every test.

Read in this order:

1. `data_structures`: chunks, KV cache, memory sets
2. `intra_chunk`: RoPE with absolute positions, causal attention inside a chunk
3. `score_tracking`: the attention that each position received
4. `memory_selection`: sinks, local window and heavy hitters become the memory set
5. `fusion`: attention over memory and chunk, as one softmax
6. `pipeline`: a layer, a whole decoder, `chunked_prefill`
7. `gather`: rows of the cache by index

`linear_attention` is the sibling of the method, whose past is a matrix instead of keys.

`ops` holds an oracle for each operator, under the operator's name; its `intra_chunk_attention`
works on batches of whole prompts and is not the one of task 2. `recall` is lexical recall, an
option.
"""

from h2o_prefill.reference import ops
from h2o_prefill.reference.data_structures import ChunkedKVCache, ChunkManager, MemorySetTracker
from h2o_prefill.reference.fusion import (
    OnlineSoftmaxState,
    finalize_online_softmax,
    fused_chunk_attention,
    init_online_softmax_from_inter,
    update_online_softmax_with_intra,
)
from h2o_prefill.reference.gather import sorted_gather
from h2o_prefill.reference.intra_chunk import (
    apply_rope_global,
    causal_mask,
    intra_chunk_attention,
    populate_kv_cache,
    rope_frequencies,
)
from h2o_prefill.reference.linear_attention import (
    bidirectional_linear_attention,
    chunkwise_linear_attention,
    decay_matrix,
    recurrent_linear_attention,
)
from h2o_prefill.reference.memory_selection import (
    build_memory_set,
    gather_memory_kv,
    get_heavy_hitter_candidates,
    get_local_window_indices,
    select_heavy_hitters,
)
from h2o_prefill.reference.pipeline import (
    ChunkedSparseAttentionLayer,
    ChunkedSparseTransformer,
    TransformerConfig,
    chunked_prefill,
)
from h2o_prefill.reference.score_tracking import ScoreTracker

__all__ = [
    "ChunkManager",
    "ChunkedKVCache",
    "ChunkedSparseAttentionLayer",
    "ChunkedSparseTransformer",
    "MemorySetTracker",
    "OnlineSoftmaxState",
    "ScoreTracker",
    "TransformerConfig",
    "apply_rope_global",
    "bidirectional_linear_attention",
    "build_memory_set",
    "causal_mask",
    "chunked_prefill",
    "chunkwise_linear_attention",
    "decay_matrix",
    "finalize_online_softmax",
    "fused_chunk_attention",
    "gather_memory_kv",
    "get_heavy_hitter_candidates",
    "get_local_window_indices",
    "init_online_softmax_from_inter",
    "intra_chunk_attention",
    "ops",
    "populate_kv_cache",
    "recurrent_linear_attention",
    "rope_frequencies",
    "select_heavy_hitters",
    "sorted_gather",
    "update_online_softmax_with_intra",
]
