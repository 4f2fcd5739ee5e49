#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/memory_count.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {
namespace {

// Higher score first; of equal scores the lower position.
bool better(const ScoredPosition& a, const ScoredPosition& b) {
  return a.score != b.score ? a.score > b.score : a.position < b.position;
}

// One head. Returns how many positions were selected.
int64_t select_memory_head(const SelectMemoryParams& p, const float* scores, int64_t num_scores,
                           ScoredPosition* workspace) {
  const int64_t local_begin = std::max<int64_t>(p.chunk_end - p.local_window, 0);
  const int64_t sink_end = std::min(p.sink_tokens, local_begin);
  int64_t candidates = 0;
  const auto consider = [&](int64_t position) {
    if (position < sink_end || position >= local_begin) return;
    const float score = position < num_scores ? scores[position] : 0.0F;
    // A NaN ranks last: comparing it would break the order.
    workspace[candidates++] = {score == score ? score : std::numeric_limits<float>::lowest(),
                               static_cast<int32_t>(position)};
  };
  for (int64_t i = 0; i < p.memory_count; ++i) {
    if (p.memory[i] < p.chunk_begin) consider(p.memory[i]);
  }
  for (int64_t position = p.chunk_begin; position < p.chunk_end; ++position) consider(position);

  const int64_t heavy = std::min(p.heavy_budget, candidates);
  if (heavy < candidates)
    std::nth_element(workspace, workspace + heavy, workspace + candidates, better);
  int32_t* end = p.selected;
  for (int64_t position = 0; position < sink_end; ++position)
    *end++ = static_cast<int32_t>(position);
  int32_t* const first_heavy = end;
  for (int64_t i = 0; i < heavy; ++i) *end++ = workspace[i].position;
  std::sort(first_heavy, end);
  for (int64_t position = local_begin; position < p.chunk_end; ++position)
    *end++ = static_cast<int32_t>(position);
  const int64_t selected = end - p.selected;
  std::fill(end, p.selected + p.sink_tokens + p.local_window + p.heavy_budget, -1);
  return selected;
}

}  // namespace

std::vector<int64_t> select_memory_heads(const SelectMemoryParams& first,
                                         const SelectMemoryHeads& layer) {
  const int64_t budget = first.sink_tokens + first.local_window + first.heavy_budget;
  std::vector<int64_t> selected(layer.heads);
  at::parallel_for(0, layer.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      SelectMemoryParams params = first;
      params.memory += head * layer.memory_width;
      params.memory_count = layer.memory_counts[head];
      params.selected += head * budget;
      selected[head] =
          select_memory_head(params, layer.scores + head * layer.num_scores, layer.num_scores,
                             layer.workspace + head * layer.workspace_width);
    }
  });
  return selected;
}

namespace {

at::Tensor select_memory_cpu(const at::Tensor& scores, const at::Tensor& memory,
                             int64_t chunk_begin, int64_t chunk_end, int64_t local_window,
                             int64_t heavy_budget, int64_t sink_tokens) {
  if (scores.scalar_type() != at::kFloat) {
    return composite::select_memory(scores, memory, chunk_begin, chunk_end, local_window,
                                    heavy_budget, sink_tokens);
  }
  check_select_memory(scores, memory, chunk_begin, chunk_end, local_window, heavy_budget,
                      sink_tokens);
  const auto dense_scores = scores.contiguous();
  const auto dense_memory = memory.contiguous();
  const int64_t heads = memory.size(0) * memory.size(1);
  const int64_t old_width = memory.size(2);
  const int64_t width = sink_tokens + local_window + heavy_budget;
  auto selected = at::empty({memory.size(0), memory.size(1), width}, memory.options());
  const int64_t candidates = old_width + chunk_end - chunk_begin;
  const auto workspace = at::empty({heads, candidates, 2}, scores.options());
  const auto counts = memory_counts(dense_memory, chunk_end, "memory");
  select_memory_heads(
      {dense_memory.const_data_ptr<int32_t>(), 0, chunk_begin, chunk_end, local_window,
       heavy_budget, sink_tokens, selected.mutable_data_ptr<int32_t>()},
      {heads, counts.data(), old_width, dense_scores.const_data_ptr<float>(), scores.size(2),
       reinterpret_cast<ScoredPosition*>(workspace.mutable_data_ptr<float>()), candidates});
  return selected;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("select_memory", &select_memory_cpu); }

}  // namespace
}  // namespace h2o_prefill
