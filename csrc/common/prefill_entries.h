// The adapters between the dispatcher and a device's implementation of sparse prefill. Each builds
// a PrefillRequest from the arguments of an op's schema (in ops/), checks it and passes it on.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "common/prefill_request.h"
#include "common/rules.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Computes the sparse attention of all rows, updates the state, and returns [B, Hq, T, Dv].
using SparseAttention = at::Tensor (*)(const PrefillRequest& request);

// From the three optional tensors of a schema.
inline RecallLists recall_lists(const OptionalTensor& offsets, const OptionalTensor& positions,
                                const OptionalTensor& visible_from) {
  return {.offsets = or_undefined(offsets),
          .positions = or_undefined(positions),
          .visible_from = or_undefined(visible_from)};
}

// A sparse call, whose last `dense_tail` queries attend to every key instead.
template <SparseAttention attend, Attention attend_densely>
at::Tensor attend_sparsely(const PrefillRequest& request) {
  at::Tensor out = attend(request);
  const int64_t length = request.length();
  if (const int64_t tail = std::min(request.settings.dense_tail, length); tail > 0) {
    out.narrow(2, length - tail, tail).copy_(attend_densely(request.last_rows(tail)));
  }
  return out;
}

// out, scores, memory, errors
using PrefillResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// A call that returns its state as new tensors: sparse or dense as the settings of a model say for
// the layer, or sparse if there is no layer.
template <SparseAttention attend, Attention attend_densely>
PrefillResult attend_with_copies(const AttentionArguments& x, const OptionalTensor& scores,
                                 const OptionalTensor& memory, const OptionalTensor& errors,
                                 int64_t last_chunk_begin, const RecallLists& recall,
                                 const PrefillConfig& settings, std::optional<int64_t> layer) {
  PrefillRequest request{x};
  request.start = or_undefined(memory);
  request.last_chunk_begin = last_chunk_begin;
  request.recall = recall;
  request.settings = settings;
  request.check();
  const bool is_sparse = !layer || settings.is_sparse(*layer, x.past(), x.length());
  request.take_copies(scores, memory, errors, /*keep=*/!is_sparse || x.is_empty());
  at::Tensor out = x.is_empty() ? x.empty_out()
                   : is_sparse  ? attend_sparsely<attend, attend_densely>(request)
                                : attend_densely(request);
  return {std::move(out), std::move(request.scores), std::move(request.memory),
          std::move(request.errors)};
}

// h2o_prefill::chunked_sparse_attention: sparse in every call, with the settings of one layer.
template <SparseAttention attend, Attention attend_densely>
PrefillResult chunked_sparse_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& scores,
    const OptionalTensor& memory, const OptionalTensor& recall_offsets,
    const OptionalTensor& recall_positions, const OptionalTensor& recall_visible_from,
    int64_t last_chunk_begin, std::string_view settings, std::optional<double> scale,
    const OptionalTensor& sinks, double softcap, const OptionalTensor& errors) {
  return attend_with_copies<attend, attend_densely>(
      {q, k, v, scale, sinks, softcap}, scores, memory, errors, last_chunk_begin,
      recall_lists(recall_offsets, recall_positions, recall_visible_from), *read_settings(settings),
      /*layer=*/std::nullopt);
}

// h2o_prefill::prefill_attention
template <SparseAttention attend, Attention attend_densely>
PrefillResult prefill_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& scores,
    const OptionalTensor& memory, const OptionalTensor& recall_offsets,
    const OptionalTensor& recall_positions, const OptionalTensor& recall_visible_from,
    int64_t last_chunk_begin, int64_t layer, std::string_view settings, std::optional<double> scale,
    const OptionalTensor& sinks, double softcap, const OptionalTensor& errors) {
  check_at_least("layer", layer, 0);
  return attend_with_copies<attend, attend_densely>(
      {q, k, v, scale, sinks, softcap}, scores, memory, errors, last_chunk_begin,
      recall_lists(recall_offsets, recall_positions, recall_visible_from),
      read_settings(settings)->of_layer(layer), layer);
}

// h2o_prefill::prefill_attention_
template <SparseAttention attend, Attention attend_densely, WindowAttention attend_in_window>
at::Tensor prefill_attention_in_place_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& cache_key,
    at::Tensor& cache_value, at::Tensor& scores, at::Tensor& memory, const at::Tensor& position,
    const OptionalTensor& recall_offsets, const OptionalTensor& recall_positions,
    const OptionalTensor& recall_visible_from, int64_t layer, std::string_view settings,
    std::optional<double> scale, const OptionalTensor& sinks, double softcap,
    const OptionalTensor& errors, std::optional<int64_t> window,
    const OptionalTensor& checkpoint_memory, const OptionalTensor& checkpoint_scores,
    const OptionalTensor& checkpoint_errors) {
  const PlacedCall call = place_call(
      {q, k, v, scale, sinks, softcap},
      {cache_key, cache_value, scores, memory, or_undefined(errors)}, position,
      recall_lists(recall_offsets, recall_positions, recall_visible_from), layer, settings, window,
      {.memory = or_undefined(checkpoint_memory),
       .scores = or_undefined(checkpoint_scores),
       .errors = or_undefined(checkpoint_errors)});
  const PrefillRequest& request = call.request;
  if (request.is_empty()) return request.empty_out();
  if (call.is_sparse) return attend_sparsely<attend, attend_densely>(request);
  if (fits_window(window, request.total())) return attend_densely(request);
  if (request.length() > 1) return std::get<0>(attend_in_window(request, *window));
  // One row sees all keys of its window.
  AttentionArguments row = request;
  row.key = request.key.narrow(2, request.total() - *window, *window);
  row.value = request.value.narrow(2, request.total() - *window, *window);
  return attend_densely(row);
}

}  // namespace h2o_prefill
