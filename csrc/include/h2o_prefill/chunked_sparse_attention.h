// Attention of one model under chunked sparse prefill.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>

#include "h2o_prefill/chunked_kv_cache.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/memory_set_tracker.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// Holds the settings only; the state of a prompt is in the cache and the tracker that are passed to
// forward. PrefillContext (prefill_context.h) holds all of it, and finds the recalled keys.
class H2O_API ChunkedSparseAttention : public torch::CustomClassHolder {
 public:
  // Throws if the settings are invalid.
  explicit ChunkedSparseAttention(PrefillConfig config = PrefillConfig::preset("recommended"));

  // Attends with the new tokens of one layer, after RoPE. query [B, Hq, T, D], key [B, Hkv, T, D],
  // value [B, Hkv, T, Dv]; key and value are appended to the cache. Returns [B, Hq, T, Dv]. Sparse
  // or dense as config.is_sparse() decides for the layer and the call; a dense call attends to
  // the whole cache, exactly, and does not change the tracker. scale: the softmax scale, default
  // D^-0.5. recall: the call's result of lexical_recall; a dense call does not need it, and
  // without it a sparse call recalls nothing. window: of a layer with a sliding window, >= 1; calls
  // whose history is longer are exact in it, and dense to the tracker. Cache and tracker belong to
  // one prompt. A call that throws leaves both as they were, except that buffers may have grown.
  at::Tensor forward(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const c10::intrusive_ptr<ChunkedKVCache>& cache,
                     const c10::intrusive_ptr<MemorySetTracker>& tracker,
                     std::optional<double> scale = std::nullopt, const RecallLists& recall = {},
                     std::optional<int64_t> window = std::nullopt) const;

  const PrefillConfig& config() const { return config_; }

 private:
  PrefillConfig config_;
  std::string settings_;  // the text that the operator takes
};

}  // namespace h2o_prefill
