// Attention of one model under chunked sparse prefill.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "h2o_prefill/chunked_kv_cache.h"
#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"
#include "h2o_prefill/memory_set_tracker.h"

namespace h2o_prefill {

// Holds the settings only; what a prompt leaves behind is in the cache and the tracker that forward is given.
class H2O_API ChunkedSparseAttention : public torch::CustomClassHolder {
 public:
  explicit ChunkedSparseAttention(PrefillConfig config);

  // Attends with the new tokens of one layer, after RoPE. query [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv];
  // key and value are appended to the cache. Returns [B, Hq, T, Dv]. Sparse for calls of at least
  // config.sparse_from() tokens in layers that are not dense; everything else attends to the whole cache, exactly.
  at::Tensor forward(int64_t layer, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const c10::intrusive_ptr<ChunkedKVCache>& cache,
                     const c10::intrusive_ptr<MemorySetTracker>& tracker) const;

  const PrefillConfig& config() const { return config_; }

 private:
  PrefillConfig config_;
};

}  // namespace h2o_prefill
