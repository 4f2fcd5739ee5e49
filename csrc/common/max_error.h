// Sparse prefill whose errors are bounded: layers with larger ones go on dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "common/prefill_request.h"

namespace h2o_prefill {

// Computes the attention of the request, updates its state, and returns [B, Hq, T, Dv].
using SparseAttention = at::Tensor (*)(const PrefillRequest& request);

// The implementation of dense_attention.
using DenseAttention = at::Tensor (*)(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      std::optional<double> scale,
                                      const std::optional<at::Tensor>& sinks, double softcap);

// The implementation of sliding_window_attention.
using WindowAttention = std::tuple<at::Tensor, at::Tensor> (*)(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap);

// Attends chunk by chunk while the error of each chunk, its mean over the KV heads, is at most the
// settings' max_error. All rows after that, of later calls too, are dense: their scores are 0, and
// scores and memory set of the rows before are left as they are. Each batch row as if it were
// alone. Without a max_error the whole request goes to `sparse` at once.
at::Tensor attend_up_to_max_error(const PrefillRequest& request, SparseAttention sparse,
                                  DenseAttention dense);

}  // namespace h2o_prefill
