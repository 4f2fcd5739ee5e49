#include "h2o_prefill/chunked_sparse_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/arguments.h"
#include "h2o_prefill/chunk_manager.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {
namespace {

// What the cache does not check: the query beside the key.
void check_query(const at::Tensor& query, const at::Tensor& key) {
  check_dims("query", query, 4);
  check_dims("key", key, 4);
  TORCH_CHECK_VALUE(query.is_floating_point(),
                    "query must be float32, bfloat16, float16 or float64, got ",
                    query.scalar_type());
  check_same_kind("key", key, query, "query");
  check_inference_only("query", query);
  TORCH_CHECK_VALUE(
      query.size(0) == key.size(0) && query.size(2) == key.size(2) && query.size(3) == key.size(3),
      "query must have batch, length and head dim of key ", key.sizes(), ", got shape ",
      query.sizes());
  TORCH_CHECK_VALUE(key.size(1) > 0 && query.size(1) % key.size(1) == 0,
                    "the query heads must be a multiple of the KV heads, got ", query.size(1),
                    " and ", key.size(1));
}

void check_budgets(const MemorySetTracker& tracker, const PrefillConfig& config) {
  TORCH_CHECK_VALUE(tracker.local_window() == config.local_window &&
                        tracker.heavy_budget() == config.heavy_budget &&
                        tracker.sink_tokens() == config.sink_tokens,
                    "tracker must have local_window, heavy_budget and sink_tokens of the config (",
                    config.local_window, ", ", config.heavy_budget, ", ", config.sink_tokens,
                    "), got (", tracker.local_window(), ", ", tracker.heavy_budget(), ", ",
                    tracker.sink_tokens(), ")");
}

// Queries that share one mask. It has a row as long as the cache for each: one mask for all would
// outgrow the cache.
constexpr int64_t kMaskRows = 512;

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, bool is_causal) {
  return at::scaled_dot_product_attention(query, key, value, mask, /*dropout_p=*/0.0, is_causal,
                                          /*scale=*/std::nullopt,
                                          /*enable_gqa=*/query.size(1) != key.size(1));
}

// Causal attention of the last queries to the whole cache: query i sees the keys up to T_total - T
// + i.
at::Tensor attend_densely(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const int64_t length = query.size(2);
  const int64_t past = key.size(2) - length;
  if (length <= 1) return attend(query, key, value, std::nullopt, /*is_causal=*/false);
  // is_causal aligns the triangle to the top left, which is right without a history only.
  if (past == 0) return attend(query, key, value, std::nullopt, /*is_causal=*/true);
  std::vector<at::Tensor> outs;
  for (int64_t row = 0; row < length; row += kMaskRows) {
    const int64_t rows = std::min(kMaskRows, length - row);
    const int64_t keys = past + row + rows;
    const auto mask = at::ones({rows, keys}, query.options().dtype(at::kBool)).tril(keys - rows);
    outs.push_back(attend(query.narrow(2, row, rows), key.narrow(2, 0, keys),
                          value.narrow(2, 0, keys), mask,
                          /*is_causal=*/false));
  }
  return outs.size() == 1 ? outs[0] : at::cat(outs, 2);
}

}  // namespace

ChunkedSparseAttention::ChunkedSparseAttention(PrefillConfig config) : config_(std::move(config)) {
  config_.validate();
}

at::Tensor ChunkedSparseAttention::forward(int64_t layer, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const c10::intrusive_ptr<ChunkedKVCache>& cache,
                                           const c10::intrusive_ptr<MemorySetTracker>& tracker,
                                           const std::optional<RecallLists>& recall) const {
  TORCH_CHECK_VALUE(cache && tracker, "cache and tracker must be given, got none");
  TORCH_CHECK_VALUE(tracker->num_layers() == cache->num_layers(),
                    "tracker must have the layers of cache (", cache->num_layers(), "), got ",
                    tracker->num_layers());
  check_query(query, key);
  const int64_t past = cache->length(layer);
  const int64_t length = query.size(2);
  const bool sparse = length >= config_.sparse_from() && !config_.is_dense_layer(layer);

  std::optional<at::Tensor> scores;
  std::optional<at::Tensor> memory;
  if (sparse) {
    check_budgets(*tracker, config_);
    if (tracker->has_scores(layer)) {
      scores = tracker->scores(layer);
      memory = tracker->indices(layer);
      TORCH_CHECK_VALUE(scores->size(2) <= past,
                        "tracker must belong to the prompt of cache, which holds ", past,
                        " tokens of layer ", layer, ", got scores of ", scores->size(2));
    }
  }

  const auto [keys, values] = cache->append(layer, key, value);
  try {
    if (!sparse) return attend_densely(query, keys, values);
    std::optional<at::Tensor> recalled[3];
    if (recall) std::tie(recalled[0], recalled[1], recalled[2]) = *recall;
    const auto [out, new_scores, new_memory] =
        chunked_sparse_attention(query, keys, values, scores, memory, recalled[0], recalled[1],
                                 recalled[2], tracker->last_chunk_begin(layer), config_.chunk_size,
                                 config_.local_window, config_.heavy_budget, config_.sink_tokens,
                                 config_.dense_tail, config_.gqa_reduce, config_.recall_block);
    tracker->update(layer, new_scores, new_memory,
                    ChunkManager(past, length, config_.chunk_size).last_chunk_begin());
    return out;
  } catch (...) {
    cache->truncate_layer(layer, past);
    throw;
  }
}

}  // namespace h2o_prefill
