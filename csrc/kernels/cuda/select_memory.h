// Selection of the memory sets of a layer on the GPU, a part of launch_chunk_end().
#pragma once

#include <cstdint>

#include "kernels/widening.h"

namespace h2o_prefill {

// Candidates of a unit are its old set, then [chunk_begin, chunk_end). The new set is, by rising
// position: the sinks, the candidates with the highest scores between sinks and local window, and
// the local window before chunk_end; -1 after.
// Of equal scores the lower position wins; a NaN ranks with the lowest finite score.
struct SelectMemoryParams {
  MemorySetView from;   // the old sets; entries from chunk_begin on do not count
  const float* scores;  // [units, scores_length], rows scores_stride apart; 0 after scores_length
  int64_t scores_stride;
  int64_t scores_length;
  int64_t chunk_begin;
  int64_t chunk_end;
  MemoryBudget budget;
  const float* errors = nullptr;  // [units, kErrorFields], which widen L and H; null: none
  WideningRule widening = {};
  int32_t* selected;  // [units, width]
  int64_t width;      // the most members of a set or more

  H2O_HOST_DEVICE MemoryBudget budget_of(int64_t unit) const {
    return errors ? budget.scaled(widening.factor(errors + unit * kErrorFields)) : budget;
  }
  H2O_HOST_DEVICE int64_t candidates() const { return from.width + chunk_end - chunk_begin; }
};

}  // namespace h2o_prefill
