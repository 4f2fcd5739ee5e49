// Selection of the memory sets of a layer, and the update of their scores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/key_sets.h"

namespace h2o_prefill {

struct ScoredPosition {
  float score;
  int32_t position;
};

// All units of a layer. Candidates of each are its old set and [chunk_begin, chunk_end).
struct SelectMemoryParams {
  int64_t units;
  MemorySetView from;   // with counts; entries from chunk_begin on do not count
  const float* scores;  // [units, scores_stride]
  int64_t scores_stride;
  int64_t num_scores;  // positions from here on have score 0
  int64_t chunk_begin;
  int64_t chunk_end;
  MemoryBudget budget;
  const int32_t* factors = nullptr;     // [units], of each unit's L and H; null: 1
  int32_t* selected;                    // [units, selected_stride]: ascending positions, then -1
  int64_t selected_stride;              // the most members of a set or more
  int64_t* selected_counts = nullptr;   // [units]
  ScoredPosition* workspace = nullptr;  // [units, workspace_stride]
  int64_t workspace_stride = 0;         // the most candidates of a unit or more

  MemoryBudget budget_of(int64_t unit) const {
    return factors ? budget.scaled(factors[unit]) : budget;
  }

  // Where candidates of the chunk end that can be chosen: of those without a score, which is 0, the
  // first heavy_budget.
  int64_t candidates_end(const MemoryBudget& budget) const {
    const int64_t scored = std::max({chunk_begin, num_scores, budget.sink_end(chunk_end)});
    return std::min(budget.local_begin(chunk_end), scored + budget.heavy_budget);
  }
  // Of a call without factors.
  int64_t max_candidates() const {
    return from.width + std::max<int64_t>(candidates_end(budget) - chunk_begin, 0);
  }
};

// In parallel over units.
void select_memory_sets(const SelectMemoryParams& params);

// scores[unit, set[j]] += sums[unit, j], where sums has the width of the sets.
void add_to_scores(const MemorySetView& sets, int64_t units, const float* sums, float* scores,
                   int64_t scores_stride);

// Entries before the first -1 of every list of sets: counts [units].
void count_members(const MemorySetView& sets, int64_t units, int64_t* counts);

}  // namespace h2o_prefill
