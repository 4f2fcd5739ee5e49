#include "kernels/cpu/memory_chain.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "kernels/cpu/memory_count.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {

at::Tensor empty_memory(const at::Tensor& scores, const MemoryBudget& budget) {
  auto memory =
      at::empty({scores.size(0), scores.size(1), budget.width()}, scores.options().dtype(at::kInt));
  std::fill_n(memory.mutable_data_ptr<int32_t>(), memory.numel(), -1);
  return memory;
}

MemoryChain::MemoryChain(const at::Tensor& scores, const at::Tensor& memory,
                         const MemoryBudget& budget, int64_t max_chunk)
    : scores_(scores),
      budget_(budget),
      heads_(scores.size(0) * scores.size(1)),
      memory_(empty_memory(scores, budget)),
      counts_(heads_) {
  start_ = memory.defined() ? memory.contiguous() : memory_;
  start_counts_ = memory_counts(start_, scores.size(2), "memory");
  next_ = at::empty_like(memory_);
  colsum_ = at::empty({heads_, budget.width()}, scores.options());
  candidates_ = std::max(budget.width(), start_.size(2)) + max_chunk;
  workspace_ = at::empty({heads_, candidates_, 2}, scores.options());
}

void MemoryChain::select(int64_t chunk_begin, int64_t chunk_end) {
  const at::Tensor& from = first_ ? start_ : memory_;
  const std::vector<int64_t>& from_counts = first_ ? start_counts_ : counts_;
  auto counts = select_memory_heads(
      {from.const_data_ptr<int32_t>(), 0, chunk_begin, chunk_end, budget_.local_window,
       budget_.heavy_budget, budget_.sink_tokens, next_.mutable_data_ptr<int32_t>()},
      {heads_, from_counts.data(), from.size(2), scores_.const_data_ptr<float>(), scores_.size(2),
       reinterpret_cast<ScoredPosition*>(workspace_.mutable_data_ptr<float>()), candidates_});
  std::swap(memory_, next_);
  counts_ = std::move(counts);
  first_ = false;
}

KeySource MemoryChain::key_source() {
  const int64_t width = budget_.width();
  return {0,
          width,
          memory_.const_data_ptr<int32_t>(),
          counts_.data(),
          false,
          colsum_.mutable_data_ptr<float>(),
          width};
}

void MemoryChain::accumulate() {
  const int64_t width = budget_.width();
  for (int64_t head = 0; head < heads_; ++head) {
    const int32_t* positions = memory_.const_data_ptr<int32_t>() + head * width;
    const float* sums = colsum_.const_data_ptr<float>() + head * width;
    float* scores = scores_.mutable_data_ptr<float>() + head * scores_.size(2);
    for (int64_t j = 0; j < counts_[head]; ++j) scores[positions[j]] += sums[j];
  }
}

}  // namespace h2o_prefill
