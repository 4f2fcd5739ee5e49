// The memory sets of one layer from chunk to chunk: the sequential part of sparse prefill.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/cpu/attend_chunk.h"

namespace h2o_prefill {

struct MemoryBudget {
  int64_t local_window;
  int64_t heavy_budget;
  int64_t sink_tokens;

  int64_t width() const { return sink_tokens + local_window + heavy_budget; }
};

// The memory sets of all heads of one layer, and the scores that they are built from.
class MemoryChain {
 public:
  // scores: fp32 [B, Hkv, T_total], contiguous, updated in place. memory: the sets to start from,
  // int32 [B, Hkv, any width], or undefined. max_chunk: the most tokens between two selections.
  MemoryChain(const at::Tensor& scores, const at::Tensor& memory, const MemoryBudget& budget,
              int64_t max_chunk);

  // Builds the sets for the chunk that begins at chunk_end.
  void select(int64_t chunk_begin, int64_t chunk_end);

  // The sets as keys to attend to, with room for their column sums.
  KeySource key_source();

  // Adds the column sums that key_source() received to the scores of the sets.
  void accumulate();

  // int32 [B, Hkv, budget.width()], ascending, then -1; all -1 before the first select().
  const at::Tensor& memory() const { return memory_; }

 private:
  at::Tensor scores_;
  MemoryBudget budget_;
  int64_t heads_;
  int64_t candidates_;
  bool first_ = true;
  at::Tensor start_;  // what the previous call left
  std::vector<int64_t> start_counts_;
  at::Tensor memory_;
  at::Tensor next_;
  std::vector<int64_t> counts_;
  at::Tensor colsum_;
  at::Tensor workspace_;
};

// The sets of a layer that has selected nothing yet.
at::Tensor empty_memory(const at::Tensor& scores, const MemoryBudget& budget);

}  // namespace h2o_prefill
