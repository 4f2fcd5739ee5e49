#include "h2o_prefill/chunked_sparse_attention.h"

#include "common/rules.h"
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
  TORCH_CHECK_VALUE(tracker.local_window() == config.local_window &&
                        tracker.heavy_budget() == config.heavy_budget &&
                        tracker.sink_tokens() == config.sink_tokens &&
                        tracker.memory_size(layer) == config.of_layer(layer).memory_size(),
                    "tracker must have local_window, heavy_budget and sink_tokens of the config (",
                    config.local_window, ", ", config.heavy_budget, ", ", config.sink_tokens,
                    ") in layer ", layer, ", got (", tracker.local_window(), ", ",
                    tracker.heavy_budget(), ", ", tracker.sink_tokens(), ")");
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
  check_budgets(*tracker, config_, layer);
  LayerState& state = *cache->state(layer);
  const int64_t past = state.length();
  TORCH_CHECK_VALUE(tracker->length(layer) <= past,
                    "tracker must belong to the prompt of cache, which holds ", past,
                    " tokens of layer ", layer, ", got scores of ", tracker->length(layer));
  if (config_.recall > 0 && !recall.offsets.defined() &&
      config_.is_sparse(layer, past, query.size(2))) {
    TORCH_WARN_ONCE(
        "h2o_prefill: recall is off in a sparse call without recall lists: they come from "
        "lexical_recall, or from a PrefillContext that knows the token ids");
  }
  const auto [keys, values] = state.append(key, value);
  try {
    return tracker->layer(layer)->attend_history(query, keys, values,
                                                 {.layer = layer,
                                                  .settings = settings_,
                                                  .scale = scale,
                                                  .recall = recall,
                                                  .window = window});
  } catch (...) {
    state.truncate(past);
    throw;
  }
}

}  // namespace h2o_prefill
