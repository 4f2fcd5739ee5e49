// Every op in plain ATen calls, for devices, dtypes and head dims without a kernel of their own.
// Accumulates in float32, or float64 for float64 inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "common/prefill_request.h"

namespace h2o_prefill::composite {

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_chunk_attention(const at::Tensor& q,
                                                                     const at::Tensor& k,
                                                                     const at::Tensor& v,
                                                                     int64_t chunk_size,
                                                                     std::optional<double> scale);

std::tuple<at::Tensor, at::Tensor, at::Tensor> memory_attention(const at::Tensor& q,
                                                                const at::Tensor& k,
                                                                const at::Tensor& v,
                                                                const at::Tensor& indices,
                                                                std::optional<double> scale);

at::Tensor dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           std::optional<double> scale, const std::optional<at::Tensor>& sinks,
                           double softcap);

std::tuple<at::Tensor, at::Tensor> sliding_window_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap);

std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                const at::Tensor& out_b, const at::Tensor& lse_b);

at::Tensor select_memory(const at::Tensor& scores, const at::Tensor& memory, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens);

void accumulate_scores_(at::Tensor& scores, const at::Tensor& memory, const at::Tensor& colsum);

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& indices);

at::Tensor chunked_sparse_attention(const PrefillRequest& request);

// Measures the errors of a chunk's rows, whose output is in `out` [B, Hq, T, Dv], and records them
// in the request's errors.
void measure_errors(const PrefillRequest& request, const at::Tensor& out, const RowRange& rows);

}  // namespace h2o_prefill::composite
