// The selection of memory sets whose heads have budgets of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "h2o_prefill/config.h"
#include "kernels/key_sets.h"
#include "kernels/widening.h"

namespace h2o_prefill {

inline MemoryBudget budget_of(const PrefillConfig& settings) {
  return {settings.local_window, settings.heavy_budget, settings.sink_tokens};
}

WideningRule widening_of(const PrefillConfig& settings);

// Returns the factors of L and H of all heads of a layer whose tensors have the sizes [B, Hkv,
// ...]: those of the settings, times what errors, fp32 [B, Hkv, kErrorFields] or undefined, widen.
std::vector<int32_t> factors_of_heads(const PrefillConfig& settings, const at::Tensor& errors,
                                      at::IntArrayRef sizes);

// Returns the memory sets of the chunk that begins at chunk_end, int32 [B, Hkv, width], with a
// budget for each head. scores [B, Hkv, chunk_end or more], sets int32 [B, Hkv, any].
at::Tensor select_sets(const at::Tensor& scores, const at::Tensor& sets, int64_t chunk_begin,
                       int64_t chunk_end, const MemoryBudget& budget,
                       const std::vector<int32_t>& factors, int64_t width);

}  // namespace h2o_prefill
