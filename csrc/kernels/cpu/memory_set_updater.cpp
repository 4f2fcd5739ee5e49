#include "kernels/cpu/memory_set_updater.h"

#include <algorithm>

namespace h2o_prefill {

MemorySetUpdater::MemorySetUpdater(const PrefillRequest& request, Workspace& workspace)
    : request_(request), workspace_(workspace), width_(request.most_members()) {
  if (request.start.defined() && request.past() > 0) start_ = request.start.contiguous();
  const int64_t units = request.units();
  const int64_t start_width = start_.defined() ? start_.size(2) : 0;
  max_candidates_ = std::max(width_, start_width) + request.largest_step();
  for (int turn = 0; turn < 2; ++turn) {
    sets_[turn] = workspace.add<int32_t>(units * width_);
    counts_[turn] = workspace.add<int64_t>(units);
  }
  sums_ = workspace.add<float>(units * width_);
  candidates_ = workspace.add<ScoredPosition>(units * max_candidates_);
}

MemorySetView MemorySetUpdater::sets() const {
  const int turn = selections_ % 2;
  return {.positions = workspace_.get(sets_[turn]),
          .width = width_,
          .counts = workspace_.get(counts_[turn])};
}

void MemorySetUpdater::select(int64_t chunk_begin, int64_t chunk_end) {
  const int64_t units = request_.units();
  MemorySetView from = sets();
  if (selections_ == 0) {
    // Counted where the second selection will be written.
    int64_t* const counts = workspace_.get(counts_[0]);
    from = {.positions = start_.defined() ? start_.const_data_ptr<int32_t>() : nullptr,
            .width = start_.defined() ? start_.size(2) : 0,
            .counts = counts};
    count_members(from, units, counts);
  }
  const int turn = ++selections_ % 2;
  if (request_.settings.widens()) factors_ = request_.factors();
  select_memory_sets({.units = units,
                      .from = from,
                      .scores = request_.scores.const_data_ptr<float>(),
                      .scores_stride = request_.scores.size(2),
                      .num_scores = chunk_end,
                      .chunk_begin = chunk_begin,
                      .chunk_end = chunk_end,
                      .budget = request_.budget(),
                      .factors = request_.settings.widens() ? factors_.data() : nullptr,
                      .selected = workspace_.get(sets_[turn]),
                      .selected_stride = width_,
                      .selected_counts = workspace_.get(counts_[turn]),
                      .workspace = workspace_.get(candidates_),
                      .workspace_stride = max_candidates_});
}

void MemorySetUpdater::accumulate() const {
  add_to_scores(sets(), request_.units(), workspace_.get(sums_),
                request_.scores.mutable_data_ptr<float>(), request_.scores.size(2));
}

void MemorySetUpdater::write_sets(const at::Tensor& memory) const {
  const MemorySetView last = sets();
  const int64_t stride = memory.size(2);
  int32_t* const first = memory.mutable_data_ptr<int32_t>();
  for (int64_t unit = 0; unit < request_.units(); ++unit) {
    int32_t* const set = first + unit * stride;
    const int32_t* const members = last.of_unit(unit);
    int32_t* const end = std::copy_n(members, last.count(unit), set);
    std::fill(end, set + stride, -1);
  }
}

}  // namespace h2o_prefill
