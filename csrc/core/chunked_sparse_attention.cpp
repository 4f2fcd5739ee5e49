#include "h2o_prefill/chunked_sparse_attention.h"

#include <ATen/ops/empty.h>

#include "common/prefill_request.h"
#include "common/rules.h"
#include "common/tensors.h"
#include "h2o_prefill/library.h"

namespace h2o_prefill {
namespace {

// Checks the query against the key, which the cache does not.
void check_query(const at::Tensor& query, const at::Tensor& key) {
  check_dims("query", query, 4);
  check_dims("key", key, 4);
  check_float("query", query);
  check_same_kind("key", key, query, "query");
  check_inference_only("query", query);
  TORCH_CHECK_VALUE(
      query.size(0) == key.size(0) && query.size(2) == key.size(2) && query.size(3) == key.size(3),
      "query must have batch, length and head dim of key ", key.sizes(), ", got shape ",
      query.sizes());
  check_head_groups(query, key);
}

void check_budgets(const MemorySetTracker& tracker, const PrefillConfig& config, int64_t layer) {
  const PrefillConfig here = config.of_layer(layer);
  TORCH_CHECK_VALUE(tracker.local_window(layer) == here.local_window &&
                        tracker.heavy_budget(layer) == here.heavy_budget &&
                        tracker.memory_size(layer) == here.memory_size() &&
                        tracker.sink_tokens() == here.sink_tokens,
                    "tracker must have local_window, heavy_budget and sink_tokens of the config (",
                    here.local_window, ", ", here.heavy_budget, ", ", here.sink_tokens,
                    ") in layer ", layer, ", got (", tracker.local_window(layer), ", ",
                    tracker.heavy_budget(layer), ", ", tracker.sink_tokens(), ")");
}

}  // namespace

ChunkedSparseAttention::ChunkedSparseAttention(PrefillConfig config)
    : config_(std::move(config)), settings_(config_.to_string()) {
  init();  // a wrong H2O_PREFILL_ISA is an error here, not in the first layer
  config_.validate();
}

at::Tensor ChunkedSparseAttention::forward(int64_t layer, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const c10::intrusive_ptr<ChunkedKVCache>& cache,
                                           const c10::intrusive_ptr<MemorySetTracker>& tracker,
                                           std::optional<double> scale, const RecallLists& recall,
                                           std::optional<int64_t> window) const {
  TORCH_CHECK_VALUE(cache && tracker, "cache and tracker must be given, got none");
  TORCH_CHECK_VALUE(tracker->num_layers() == cache->num_layers(),
                    "tracker must have the layers of cache (", cache->num_layers(), "), got ",
                    tracker->num_layers());
  check_query(query, key);
  const int64_t past = cache->length(layer);
  const int64_t length = query.size(2);
  const bool sparse =
      length > 0 && config_.is_sparse(layer, past, length) && fits_window(window, past + length);
  TORCH_CHECK_VALUE(tracker->length(layer) <= past,
                    "tracker must belong to the prompt of cache, which holds ", past,
                    " tokens of layer ", layer, ", got scores of ", tracker->length(layer));
  if (sparse) {
    check_budgets(*tracker, config_, layer);
    if (config_.recall > 0 && !recall.offsets.defined()) {
      TORCH_WARN_ONCE(
          "h2o_prefill: recall is off in a sparse call without recall lists: they come from "
          "lexical_recall, or from a PrefillContext that knows the token ids");
    }
  }

  PrefillBuffers buffers;
  std::tie(buffers.key, buffers.value) = cache->reserve(layer, key, value);
  std::tie(buffers.scores, buffers.memory, buffers.errors) =
      tracker->reserve(layer, key, sparse ? buffers.key.size(2) : 0);
  const auto position = at::empty({2}, at::kLong);
  position.mutable_data_ptr<int64_t>()[0] = past;
  position.mutable_data_ptr<int64_t>()[1] = tracker->last_chunk_begin(layer);
  const int64_t chunks = sparse ? length / config_.chunk_size : 0;
  const Checkpoints kept = tracker->reserve_checkpoints(layer, past, chunks);
  auto out =
      prefill_attention_(query, key, value, buffers, position, layer, settings_, recall, scale,
                         /*sinks=*/std::nullopt, /*softcap=*/0.0, window, kept);
  cache->commit(layer, length);
  if (sparse) {
    tracker->commit(layer, past + length, config_.last_chunk_begin(past, length));
    tracker->keep_checkpoints(layer, past, config_.chunk_size, kept);
  }
  return out;
}

}  // namespace h2o_prefill
