#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/select_memory.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {
namespace {

// Higher score first; of equal scores the lower position.
bool better(const ScoredPosition& a, const ScoredPosition& b) {
  return a.score != b.score ? a.score > b.score : a.position < b.position;
}

int32_t* append_range(int32_t* end, int64_t from, int64_t to) {
  for (int64_t position = from; position < to; ++position) *end++ = static_cast<int32_t>(position);
  return end;
}

void select_one_set(const SelectMemoryParams& p, int64_t unit) {
  const MemoryBudget budget = p.budget_of(unit);
  const int64_t local_begin = budget.local_begin(p.chunk_end);
  const int64_t sink_end = budget.sink_end(p.chunk_end);
  const float* const scores = p.scores + unit * p.scores_stride;
  const int64_t num_scores = p.num_scores;
  ScoredPosition* const candidate = p.workspace + unit * p.workspace_stride;
  int64_t candidates = 0;
  const auto consider = [&](int64_t position) {
    if (position < sink_end || position >= local_begin) return;
    const float score = position < num_scores ? scores[position] : 0.0F;
    // A NaN ranks last: comparing it would break the order.
    candidate[candidates++] = {score == score ? score : std::numeric_limits<float>::lowest(),
                               static_cast<int32_t>(position)};
  };
  const int32_t* const old_set = p.from.of_unit(unit);
  const int64_t old_count = p.from.count(unit);
  for (int64_t i = 0; i < old_count; ++i) {
    if (old_set[i] < p.chunk_begin) consider(old_set[i]);
  }
  const int64_t candidates_end = p.candidates_end(budget);
  for (int64_t position = p.chunk_begin; position < candidates_end; ++position) consider(position);

  const int64_t heavy = std::min(budget.heavy_budget, candidates);
  if (heavy < candidates) {
    std::nth_element(candidate, candidate + heavy, candidate + candidates, better);
  }
  int32_t* const first = p.selected + unit * p.selected_stride;
  int32_t* end = append_range(first, 0, sink_end);
  int32_t* const first_heavy = end;
  for (int64_t i = 0; i < heavy; ++i) *end++ = candidate[i].position;
  std::sort(first_heavy, end);
  end = append_range(end, local_begin, p.chunk_end);
  std::fill(end, first + p.selected_stride, -1);
  p.selected_counts[unit] = end - first;
}

at::Tensor select_memory_cpu(const at::Tensor& scores_argument, const at::Tensor& memory_argument,
                             int64_t chunk_begin, int64_t chunk_end, int64_t local_window,
                             int64_t heavy_budget, int64_t sink_tokens) {
  check_select_memory(scores_argument, memory_argument, chunk_begin, chunk_end, local_window,
                      heavy_budget, sink_tokens);
  if (scores_argument.scalar_type() != at::kFloat) {
    return composite::select_memory(scores_argument, memory_argument, chunk_begin, chunk_end,
                                    local_window, heavy_budget, sink_tokens);
  }
  const auto scores = scores_argument.contiguous();
  const auto memory = memory_argument.contiguous();
  const int64_t units = memory.size(0) * memory.size(1);
  const MemoryBudget budget{local_window, heavy_budget, sink_tokens};
  auto selected = at::empty({memory.size(0), memory.size(1), budget.width()}, memory.options());
  MemorySetView from{.positions = memory.const_data_ptr<int32_t>(), .width = memory.size(2)};
  SelectMemoryParams params{.units = units,
                            .from = from,
                            .scores = scores.const_data_ptr<float>(),
                            .scores_stride = scores.size(2),
                            .num_scores = scores.size(2),
                            .chunk_begin = chunk_begin,
                            .chunk_end = chunk_end,
                            .budget = budget,
                            .selected = selected.mutable_data_ptr<int32_t>(),
                            .selected_stride = budget.width()};
  Workspace workspace;
  params.workspace_stride = params.max_candidates();
  const auto counts = workspace.add<int64_t>(units);
  const auto selected_counts = workspace.add<int64_t>(units);
  const auto candidates = workspace.add<ScoredPosition>(units * params.workspace_stride);
  workspace.allocate();
  count_members(from, units, workspace.get(counts));
  params.from.counts = workspace.get(counts);
  params.selected_counts = workspace.get(selected_counts);
  params.workspace = workspace.get(candidates);
  select_memory_sets(params);
  return selected;
}

}  // namespace

void select_memory_sets(const SelectMemoryParams& params) {
  at::parallel_for(0, params.units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) select_one_set(params, unit);
  });
}

void add_to_scores(const MemorySetView& sets, int64_t units, const float* sums, float* scores,
                   int64_t scores_stride) {
  for (int64_t unit = 0; unit < units; ++unit) {
    const int32_t* const set = sets.of_unit(unit);
    const float* const set_sums = sums + unit * sets.width;
    float* const unit_scores = scores + unit * scores_stride;
    for (int64_t j = 0; j < sets.width && set[j] >= 0; ++j) unit_scores[set[j]] += set_sums[j];
  }
}

void count_members(const MemorySetView& sets, int64_t units, int64_t* counts) {
  for (int64_t unit = 0; unit < units; ++unit) {
    const int32_t* const set = sets.of_unit(unit);
    counts[unit] =
        std::partition_point(set, set + sets.width, [](int32_t p) { return p >= 0; }) - set;
  }
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("select_memory", &select_memory_cpu); }

}  // namespace h2o_prefill
