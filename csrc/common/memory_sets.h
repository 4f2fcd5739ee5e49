// The selection of memory sets whose heads have budgets of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "h2o_prefill/config.h"
#include "h2o_prefill/ops.h"
#include "kernels/key_sets.h"
#include "kernels/widening.h"

namespace h2o_prefill {

inline MemoryBudget budget_of(const PrefillConfig& settings) {
  return {settings.local_window, settings.heavy_budget, settings.sink_tokens};
}

WideningRule widening_of(const PrefillConfig& settings);

// The rows of a chunk of `count` tokens from `begin` on in which errors are measured, counted from
// its first.
std::vector<int64_t> measured_rows(const PrefillConfig& settings, int64_t begin, int64_t count);

// Returns the factors of L and H of all heads of a layer whose tensors have the sizes [B, Hkv,
// ...]: what errors, fp32 [B, Hkv, kErrorFields] or undefined, widened them by.
std::vector<int32_t> factors_of_heads(const PrefillConfig& settings, const at::Tensor& errors,
                                      at::IntArrayRef sizes);

// Adds the errors of a chunk, [B, Hkv], to errors, fp32 [B, Hkv, kErrorFields], in place.
void record_errors(const at::Tensor& errors, const at::Tensor& error, const WideningRule& rule);

// Returns the memory sets of the chunk that begins at chunk_end, int32 [B, Hkv, width], with a
// budget for each head. scores [B, Hkv, chunk_end or more], sets int32 [B, Hkv, any].
at::Tensor select_sets(const at::Tensor& scores, const at::Tensor& sets, int64_t chunk_begin,
                       int64_t chunk_end, const MemoryBudget& budget,
                       const std::vector<int32_t>& factors, int64_t width);

// Scores [B, Hkv, any] of the positions of memory sets [B, Hkv, M]; 0 where those are -1.
inline at::Tensor scores_of_sets(const at::Tensor& scores, const at::Tensor& memory) {
  return gather_rows(scores.unsqueeze(3), memory).squeeze(3);
}

// Returns the set that the next chunk after a state attends to, int32 [B, Hkv, K + L + H], with the
// budget of the head whose budget is largest.
at::Tensor next_memory(const PrefillState& state, const PrefillConfig& settings);

}  // namespace h2o_prefill
