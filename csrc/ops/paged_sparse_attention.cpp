#include "ops/dispatch.h"

namespace h2o_prefill {

// One layer's prefill of one request whose keys and values lie in pages [pages, Hkv, size, D or Dv]
// with any strides: token t is row t % size of page page_table[t / size], int32 or int64. q [1, Hq,
// T, D] are the last of its first `total` tokens; out [1, Hq, T, Dv] is written; both may have any
// strides. Sparse in every call, except in dense layers and by exact settings. layer and settings
// are as in prefill_attention_(), recall_* are of the call. memory, scores and errors are the
// checkpoint before the call, [1, Hkv, ...]; without one, earlier tokens are candidates with score
// 0. Returns the checkpoints, as `Checkpoints` has them, at as many of the last ends of chunks as
// `checkpoints` says, the end of the call included, or none of a dense call.
H2O_SCHEMA(
    "paged_sparse_attention_(Tensor q, Tensor key_pages, Tensor value_pages, Tensor page_table, "
    "int total, Tensor(a!) out, Tensor? memory, Tensor? scores, Tensor? errors, "
    "Tensor? recall_offsets, Tensor? recall_positions, Tensor? recall_visible_from, int layer, "
    "str settings, int checkpoints, float? scale=None) -> (Tensor, Tensor, Tensor)")

}  // namespace h2o_prefill
