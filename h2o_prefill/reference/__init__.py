"""The method in readable PyTorch, and the oracle of every test: each step is implemented once.

Read in this order:

1. `attention`: RoPE with absolute positions, attention inside a chunk, and its fusion with
   attention to the memory set by online softmax
2. `memory`: the attention that each position received, the memory set that is selected by it, and
   the rows of the cache that the set names
3. `recall`: lexical recall, an option
4. `ops`: the steps put together, one function an operator and under the operator's name
5. `model`: a layer, a whole decoder, `chunked_prefill`

`linear_attention` is the sibling of the method, whose past is a matrix instead of keys.

Symbols: N tokens; S chunk size; L local window, H heavy budget, K sink tokens, M <= K + L + H
memory size; Hq query heads, Hkv KV heads, G = Hq / Hkv; D key dim, Dv value dim. Query head h
belongs to KV head h // G.
"""

from h2o_prefill.reference import ops
from h2o_prefill.reference.attention import (
    OnlineSoftmaxState,
    apply_rope_global,
    causal_mask,
    finalize_online_softmax,
    fused_chunk_attention,
    init_online_softmax_from_inter,
    intra_chunk_attention,
    populate_kv_cache,
    rope_frequencies,
    update_online_softmax_with_intra,
)
from h2o_prefill.reference.linear_attention import (
    bidirectional_linear_attention,
    chunkwise_linear_attention,
    decay_matrix,
    recurrent_linear_attention,
)
from h2o_prefill.reference.memory import (
    ScoreTracker,
    build_memory_set,
    gather_memory_kv,
    get_heavy_hitter_candidates,
    get_local_window_indices,
    select_heavy_hitters,
    sorted_gather,
)
from h2o_prefill.reference.model import (
    ChunkedSparseAttentionLayer,
    ChunkedSparseTransformer,
    Prompt,
    TransformerConfig,
    chunked_prefill,
)
