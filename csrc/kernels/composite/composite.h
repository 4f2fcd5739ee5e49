// Every op in plain ATen calls, for devices, dtypes and head dims without a kernel of their own.
// Accumulates in float32, or float64 for float64 inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

#include "common/prefill_request.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill::composite {

// With the parameters of the functions in ops.h.
decltype(h2o_prefill::merge_states) merge_states;
decltype(h2o_prefill::select_memory) select_memory;
decltype(h2o_prefill::accumulate_scores_) accumulate_scores_;
decltype(h2o_prefill::gather_rows) gather_rows;
decltype(h2o_prefill::linear) linear;
std::remove_pointer_t<GatherPages> gather_pages;

AttentionResult intra_chunk_attention(const AttentionArguments& x, int64_t chunk_size);
AttentionResult memory_attention(const AttentionArguments& x, const at::Tensor& indices);
at::Tensor dense_attention(const AttentionArguments& x);
std::tuple<at::Tensor, at::Tensor> sliding_window_attention(const AttentionArguments& x,
                                                            int64_t window);
at::Tensor chunked_sparse_attention(const PrefillRequest& request);

// Measures the errors of a chunk's rows, whose output is in `out` [B, Hq, T, Dv], and records them
// in the request's errors.
void measure_errors(const PrefillRequest& request, const at::Tensor& out, const RowRange& rows);

}  // namespace h2o_prefill::composite
