// The arguments of softmax attention, and the adapters between the dispatcher and a device's
// implementation of the exact operators. An adapter checks the arguments, so that no caller can
// skip the checks. The schemas are in ops/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "common/tensors.h"

namespace h2o_prefill {

struct AttentionArguments {
  at::Tensor query;  // [B, Hq, T, D]
  at::Tensor key;    // [B, Hkv, T_total, D], a history that ends with the query's tokens
  at::Tensor value;  // [B, Hkv, T_total, Dv]
  std::optional<double> softmax_scale = {};
  // [Hq]: a further logit of each row's denominators, in the output once and in the column sums of
  // either key set.
  OptionalTensor sinks = {};
  double softcap = 0.0;  // logits z become softcap tanh(z / softcap); 0: no cap

  int64_t length() const { return query.size(2); }
  int64_t total() const { return key.size(2); }
  int64_t past() const { return total() - length(); }
  double scale() const {
    return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  }
  bool is_plain() const { return !sinks && softcap == 0.0; }
  bool is_empty() const { return query.numel() == 0; }

  // Uninitialised [B, Hq, T, Dv] of the query's dtype, and [B, Hq, T] of the accumulation type.
  at::Tensor empty_out() const {
    return empty_heads(query.size(0), query.size(1), length(), value.size(3), query);
  }
  at::Tensor empty_lse() const;

  // The same arguments with convert() of query, key and value, and float32 sinks.
  AttentionArguments with_rows(at::Tensor (*convert)(const at::Tensor&)) const;
  // The last rows of the query alone.
  AttentionArguments last_rows(int64_t rows) const;
  const float* sink_data() const { return sinks ? sinks->const_data_ptr<float>() : nullptr; }
};

using Attention = at::Tensor (*)(const AttentionArguments& x);
using WindowAttention = std::tuple<at::Tensor, at::Tensor> (*)(const AttentionArguments& x,
                                                               int64_t window);
using AttentionResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, lse, column sums

// Throw c10::ValueError if an argument is wrong.
void check_dense_attention(const AttentionArguments& x);
void check_sliding_window_attention(const AttentionArguments& x, int64_t window);
void check_intra_chunk_attention(const AttentionArguments& x, int64_t chunk_size);
void check_memory_attention(const AttentionArguments& x, const at::Tensor& indices);

template <Attention attend>
at::Tensor dense_attention_entry(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 std::optional<double> scale, const OptionalTensor& sinks,
                                 double softcap) {
  const AttentionArguments x{q, k, v, scale, sinks, softcap};
  check_dense_attention(x);
  return attend(x);
}

template <WindowAttention attend>
std::tuple<at::Tensor, at::Tensor> sliding_window_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
    std::optional<double> scale, const OptionalTensor& sinks, double softcap) {
  const AttentionArguments x{q, k, v, scale, sinks, softcap};
  check_sliding_window_attention(x, window);
  return attend(x, window);
}

template <AttentionResult (*attend)(const AttentionArguments& x, int64_t chunk_size)>
AttentionResult intra_chunk_attention_entry(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, int64_t chunk_size,
                                            std::optional<double> scale) {
  const AttentionArguments x{q, k, v, scale};
  check_intra_chunk_attention(x, chunk_size);
  return attend(x, chunk_size);
}

template <AttentionResult (*attend)(const AttentionArguments& x, const at::Tensor& indices)>
AttentionResult memory_attention_entry(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& indices,
                                       std::optional<double> scale) {
  const AttentionArguments x{q, k, v, scale};
  check_memory_attention(x, indices);
  return attend(x, indices);
}

}  // namespace h2o_prefill
