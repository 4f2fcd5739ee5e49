// The memory sets of one layer from chunk to chunk: the sequential part of sparse prefill.
#pragma once

#include "common/prefill_request.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/select_memory.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {

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

}  // namespace h2o_prefill
