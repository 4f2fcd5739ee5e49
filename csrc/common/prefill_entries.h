// The adapters between the dispatcher and a device's implementation of sparse prefill. Each builds
// a PrefillRequest from the arguments of an op's schema (in ops/), checks it and passes it on.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "common/prefill_request.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Computes the attention of the request, updates its state, and returns [B, Hq, T, Dv].
using SparseAttention = at::Tensor (*)(const PrefillRequest& request);

// From the three optional tensors of a schema.
inline RecallLists recall_lists(const std::optional<at::Tensor>& offsets,
                                const std::optional<at::Tensor>& positions,
                                const std::optional<at::Tensor>& visible_from) {
  return {.offsets = offsets.value_or(at::Tensor()),
          .positions = positions.value_or(at::Tensor()),
          .visible_from = visible_from.value_or(at::Tensor())};
}

// The checked request of a call that returns scores and memory as new tensors.
inline PrefillRequest functional_request(const AttentionArguments& x,
                                         const std::optional<at::Tensor>& memory,
                                         int64_t last_chunk_begin, const RecallLists& recall,
                                         const PrefillConfig& settings) {
  PrefillRequest request{x};
  request.start = memory.value_or(at::Tensor());
  request.last_chunk_begin = last_chunk_begin;
  request.recall = recall;
  request.settings = settings;
  request.check();
  return request;
}

// h2o_prefill::chunked_sparse_attention: sparse in every call, with the settings of one layer.
template <SparseAttention attend>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> chunked_sparse_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin,
    std::string_view settings, std::optional<double> scale, const std::optional<at::Tensor>& sinks,
    double softcap, const std::optional<at::Tensor>& errors) {
  PrefillRequest request =
      functional_request({q, k, v, scale, sinks, softcap}, memory, last_chunk_begin,
                         recall_lists(recall_offsets, recall_positions, recall_visible_from),
                         *read_settings(settings));
  request.take_copies(scores, memory, errors, /*keep=*/request.is_empty());
  at::Tensor out = request.is_empty() ? request.empty_out() : attend(request);
  return {std::move(out), std::move(request.scores), std::move(request.memory),
          std::move(request.errors)};
}

// h2o_prefill::prefill_attention
template <SparseAttention attend, Attention attend_densely>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> prefill_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& memory,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t last_chunk_begin, int64_t layer,
    std::string_view settings, std::optional<double> scale, const std::optional<at::Tensor>& sinks,
    double softcap, const std::optional<at::Tensor>& errors) {
  PrefillRequest request =
      functional_request({q, k, v, scale, sinks, softcap}, memory, last_chunk_begin,
                         recall_lists(recall_offsets, recall_positions, recall_visible_from),
                         layer_settings(settings, layer));
  const bool is_sparse = request.settings.is_sparse(layer, request.past(), request.length());
  request.take_copies(scores, memory, errors, /*keep=*/!is_sparse);
  at::Tensor out = request.is_empty() ? request.empty_out()
                   : is_sparse        ? attend(request)
                                      : attend_densely(request);
  return {std::move(out), std::move(request.scores), std::move(request.memory),
          std::move(request.errors)};
}

// h2o_prefill::prefill_attention_
template <SparseAttention attend, Attention attend_densely, WindowAttention attend_in_window>
at::Tensor prefill_attention_in_place_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& cache_key,
    at::Tensor& cache_value, at::Tensor& scores, at::Tensor& memory, const at::Tensor& position,
    const std::optional<at::Tensor>& recall_offsets,
    const std::optional<at::Tensor>& recall_positions,
    const std::optional<at::Tensor>& recall_visible_from, int64_t layer, std::string_view settings,
    std::optional<double> scale, const std::optional<at::Tensor>& sinks, double softcap,
    const std::optional<at::Tensor>& errors, std::optional<int64_t> window,
    const std::optional<at::Tensor>& checkpoint_memory,
    const std::optional<at::Tensor>& checkpoint_scores,
    const std::optional<at::Tensor>& checkpoint_errors) {
  const PlacedCall call = place_call(
      {q, k, v, scale, sinks, softcap},
      {cache_key, cache_value, scores, memory, errors.value_or(at::Tensor())}, position,
      recall_lists(recall_offsets, recall_positions, recall_visible_from), layer, settings, window,
      {.memory = checkpoint_memory.value_or(at::Tensor()),
       .scores = checkpoint_scores.value_or(at::Tensor()),
       .errors = checkpoint_errors.value_or(at::Tensor())});
  const PrefillRequest& request = call.request;
  if (request.is_empty()) return request.empty_out();
  if (call.is_sparse) return attend(request);
  if (fits_window(window, request.total())) return attend_densely(request);
  if (request.length() > 1) return std::get<0>(attend_in_window(request, *window));
  // One row sees all keys of its window.
  AttentionArguments row = request;
  row.key = request.key.narrow(2, request.total() - *window, *window);
  row.value = request.value.narrow(2, request.total() - *window, *window);
  return attend_densely(row);
}

}  // namespace h2o_prefill
