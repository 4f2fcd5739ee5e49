#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "common/prefill_entries.h"
#include "common/tensors.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/error_rows.h"
#include "kernels/cpu/select_memory.h"

namespace h2o_prefill {
namespace {

// The memory sets of all units of a request whose scores are float32, and the scores that they are
// selected by. Before each chunk but the first: select(), attend to sets() with column sums in
// sums(), accumulate().
class MemorySetUpdater {
 public:
  // Plans its part of the workspace, which is allocated before anything else is called.
  MemorySetUpdater(const PrefillRequest& request, Workspace& workspace);

  // Selects the sets for the chunk that begins at chunk_end.
  void select(int64_t chunk_begin, int64_t chunk_end);

  MemorySetView sets() const;
  ColumnSums sums() const { return {.data = workspace_.get(sums_), .stride = width_}; }

  // Adds the column sums to the scores of the sets.
  void accumulate() const;

  // Writes the sets of the last select() to memory, int32 [B, Hkv, any], followed by -1.
  void write_sets(const at::Tensor& memory) const;

  // The most members of a set.
  int64_t max_members() const { return width_; }

 private:
  const PrefillRequest& request_;
  const Workspace& workspace_;
  int64_t width_;  // of sets in the workspace: bounded by the history too, not by the budget alone
  at::Tensor start_;
  int64_t selections_ = 0;
  Workspace::Part<int32_t> sets_[2];  // selections take turns
  Workspace::Part<int64_t> counts_[2];
  std::vector<int32_t> factors_;  // of L and H
  Workspace::Part<float> sums_;
  Workspace::Part<ScoredPosition> candidates_;
  int64_t max_candidates_;
};

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

at::Tensor chunked_sparse_attention_cpu(const PrefillRequest& request) {
  if (request.query.scalar_type() == at::kDouble) {
    return composite::chunked_sparse_attention(request);
  }
  const AttentionArguments x = request.with_rows(&with_contiguous_rows);
  const RecallLists recall =
      converted(request.recall, [](const at::Tensor& list) { return list.contiguous(); });
  const int64_t length = request.length();
  auto out = x.empty_out();

  Workspace workspace;
  std::optional<MemorySetUpdater> updater;
  if (request.selects() || request.num_checkpoints() > 0) updater.emplace(request, workspace);
  AttentionCall call(x, out, /*lse=*/nullptr);
  call.reduce_max = request.reduce_max();
  call.recall = request.recall_view(recall);
  const int64_t largest = request.largest_chunk();
  const int64_t members = updater ? updater->max_members() : 0;
  AttendChunk attend(call, {.rows = largest, .keys = {largest, members}}, workspace);
  std::optional<ErrorRows> errors;
  if (request.selects() && request.settings.error_rows > 0) errors.emplace(request, workspace);
  const auto lse = workspace.add<float>(call.query.batch * call.query.heads * length);
  workspace.allocate();
  call.lse = workspace.get(lse);

  const int64_t scores_stride = request.scores.size(2);
  float* const scores = request.scores.mutable_data_ptr<float>();
  int64_t previous_begin = request.last_chunk_begin;
  if (errors) errors->attend(call);
  const auto select = [&](int64_t row) {
    updater->select(previous_begin, request.past() + row);
    request.keep_checkpoint(row, [&](const at::Tensor& sets) { updater->write_sets(sets); });
  };
  for_each_chunk(request, [&](const RowRange& rows) {
    const int64_t begin = rows.position();
    const ColumnSums chunk_sums{.data = scores + begin, .stride = scores_stride};
    if (begin == 0) {
      attend.run(call, rows, {{own_keys(rows), chunk_sums}});
    } else {
      select(rows.begin);
      attend.run(call, rows, {{own_keys(rows), chunk_sums}, {updater->sets(), updater->sums()}});
      updater->accumulate();
      if (errors) errors->measure(call, rows);
    }
    previous_begin = begin;
  });
  if (request.selects()) {
    updater->write_sets(request.memory);
  } else {
    std::fill_n(request.memory.mutable_data_ptr<int32_t>(), request.memory.numel(), -1);
  }
  if (request.ends_at_checkpoint()) select(length);
  return out;
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) {
  m.impl("chunked_sparse_attention",
         &chunked_sparse_attention_entry<chunked_sparse_attention_cpu, dense_attention_cpu>);
  m.impl("prefill_attention",
         &prefill_attention_entry<chunked_sparse_attention_cpu, dense_attention_cpu>);
  m.impl("prefill_attention_",
         &prefill_attention_in_place_entry<chunked_sparse_attention_cpu, dense_attention_cpu,
                                           sliding_window_attention_cpu>);
}

}  // namespace
}  // namespace h2o_prefill
