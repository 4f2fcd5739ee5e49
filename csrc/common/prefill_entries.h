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

// h2o_prefill::chunked_sparse_attention: sparse in every call, with the settings of one layer;
// returns the state as new tensors.
template <SparseAttention attend, Attention attend_densely>
PrefillResult chunked_sparse_attention_entry(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& scores,
    const OptionalTensor& memory, const OptionalTensor& recall_offsets,
    const OptionalTensor& recall_positions, const OptionalTensor& recall_visible_from,
    int64_t last_chunk_begin, std::string_view settings, std::optional<double> scale,
    const OptionalTensor& sinks, double softcap, const OptionalTensor& errors) {
  PrefillRequest request{{q, k, v, scale, sinks, softcap}};
  request.start = or_undefined(memory);
  request.last_chunk_begin = last_chunk_begin;
  request.recall = recall_lists(recall_offsets, recall_positions, recall_visible_from);
  request.settings = *read_settings(settings);
  request.check();
  request.take_copies(scores, memory, errors);
  at::Tensor out =
      request.is_empty() ? request.empty_out() : attend_sparsely<attend, attend_densely>(request);
  return {std::move(out), std::move(request.scores), std::move(request.memory),
          std::move(request.errors)};
}

// h2o_prefill::prefill_attention_: in place, sparse or dense as the settings of a model say.
template <SparseAttention attend, Attention attend_densely, WindowAttention attend_in_window>
at::Tensor prefill_attention_entry(
    const at::Tensor& q, const OptionalTensor& k, const OptionalTensor& v, at::Tensor& cache_key,
    at::Tensor& cache_value, at::Tensor& scores, at::Tensor& memory, const OptionalTensor& errors,
    const at::Tensor& position, int64_t layer, std::string_view settings,
    std::optional<double> scale, const OptionalTensor& sinks, double softcap,
    const OptionalTensor& recall_offsets, const OptionalTensor& recall_positions,
    const OptionalTensor& recall_visible_from, std::optional<int64_t> window,
    const OptionalTensor& checkpoint_memory, const OptionalTensor& checkpoint_scores,
    const OptionalTensor& checkpoint_errors) {
  const PlacedCall call =
      place_call(q, or_undefined(k), or_undefined(v),
                 {cache_key, cache_value, scores, memory, or_undefined(errors)}, position,
                 {layer, settings, scale, sinks, softcap,
                  recall_lists(recall_offsets, recall_positions, recall_visible_from), window},
                 {or_undefined(checkpoint_memory), or_undefined(checkpoint_scores),
                  or_undefined(checkpoint_errors)});
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

// h2o_prefill::paged_sparse_attention_: of one request in pages, from a checkpoint to others;
// sparse in every call, except in dense layers and by exact settings.
template <SparseAttention attend, Attention attend_densely, GatherPages gather>
std::tuple<at::Tensor, at::Tensor, at::Tensor> paged_sparse_attention_entry(
    const at::Tensor& q, const at::Tensor& key_pages, const at::Tensor& value_pages,
    const at::Tensor& page_table, int64_t total, at::Tensor& out, const OptionalTensor& memory,
    const OptionalTensor& scores, const OptionalTensor& errors,
    const OptionalTensor& recall_offsets, const OptionalTensor& recall_positions,
    const OptionalTensor& recall_visible_from, int64_t layer, std::string_view settings,
    int64_t checkpoints, std::optional<double> scale) {
  const PlacedCall call =
      place_paged_call({q, key_pages, value_pages, scale}, page_table, total, out, memory, scores,
                       errors, recall_lists(recall_offsets, recall_positions, recall_visible_from),
                       layer, settings, checkpoints, gather);
  const PrefillRequest& request = call.request;
  if (call.is_sparse && !request.is_empty()) {
    out.copy_(attend_sparsely<attend, attend_densely>(request));
  } else {  // By chunks too, so that calls may be cut there.
    for_each_chunk(request, [&](const RowRange& rows) {
      AttentionArguments chunk = request;
      chunk.query = request.query.narrow(2, rows.begin, rows.count);
      chunk.key = request.key.narrow(2, 0, rows.position() + rows.count);
      chunk.value = request.value.narrow(2, 0, rows.position() + rows.count);
      out.narrow(2, rows.begin, rows.count).copy_(attend_densely(chunk));
    });
  }
  return {request.checkpoints.memory, request.checkpoints.scores, request.checkpoints.errors};
}

}  // namespace h2o_prefill
