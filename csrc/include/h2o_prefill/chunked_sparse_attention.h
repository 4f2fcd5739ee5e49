// Attention of one model under chunked sparse prefill.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>

#include "h2o_prefill/chunked_kv_cache.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/memory_set_tracker.h"

namespace h2o_prefill {

// Offsets, positions and visible_from, as lexical_recall returns them.
using RecallLists = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Holds the settings only; what a prompt leaves behind is in the cache and the tracker that forward
// is given.
class H2O_API ChunkedSparseAttention : public torch::CustomClassHolder {
 public:
  // Throws if the settings are not valid.
  explicit ChunkedSparseAttention(PrefillConfig config);

  // Attends with the new tokens of one layer, after RoPE. query [B, Hq, T, D], key [B, Hkv, T, D],
  // value [B, Hkv, T, Dv]; key and value are appended to the cache. Returns [B, Hq, T, Dv]. Sparse
  // for calls of at least config.sparse_from() tokens in layers that are not dense; everything else
  // attends to the whole cache, exactly, and leaves the tracker alone. recall: what lexical_recall
  // returned for the call with the config's chunk_size and recall_block; a dense call does not need
  // it. Cache and tracker belong to one prompt. A call that throws leaves both as they were, but
  // for buffers that have grown.
  at::Tensor forward(int64_t layer, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const c10::intrusive_ptr<ChunkedKVCache>& cache,
                     const c10::intrusive_ptr<MemorySetTracker>& tracker,
                     const std::optional<RecallLists>& recall = std::nullopt) const;

  const PrefillConfig& config() const { return config_; }

 private:
  PrefillConfig config_;
};

}  // namespace h2o_prefill
