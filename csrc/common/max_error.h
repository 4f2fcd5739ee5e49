// Sparse prefill whose errors are bounded: layers with larger ones go on dense.
#pragma once

#include "common/prefill_request.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Computes the attention of the request, updates its state, and returns [B, Hq, T, Dv].
using SparseAttention = at::Tensor (*)(const PrefillRequest& request);

// Implementations of the operators.
using DenseAttention = decltype(&dense_attention);
using WindowAttention = decltype(&sliding_window_attention);

// Attends chunk by chunk while the error of each chunk, its mean over the KV heads, is at most the
// settings' max_error. All rows after that, of later calls too, are dense: their scores are 0, and
// scores and memory set of the rows before are left as they are. Each batch row as if it were
// alone. Without a max_error the whole request goes to `sparse` at once.
at::Tensor attend_up_to_max_error(const PrefillRequest& request, SparseAttention sparse,
                                  DenseAttention dense);

}  // namespace h2o_prefill
