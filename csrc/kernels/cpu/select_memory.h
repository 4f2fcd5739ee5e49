// Selection of one head's memory set.
#pragma once

#include <cstdint>

namespace h2o_prefill {

struct SelectMemoryParams {
  const int32_t* memory;  // ascending, the first memory_count entries >= 0
  int64_t memory_count;
  int64_t chunk_begin;
  int64_t chunk_end;
  int64_t local_window;
  int64_t heavy_budget;
  int64_t sink_tokens;
  int32_t* selected;  // [sink_tokens + local_window + heavy_budget]
};

struct ScoredPosition {
  float score;
  int32_t position;
};

// scores: [num_scores], 0 behind. workspace: memory_count + chunk_end - chunk_begin entries.
// Returns how many positions were selected; they stand first, ascending, then -1.
int64_t select_memory_head(const SelectMemoryParams& params, const float* scores,
                           int64_t num_scores, ScoredPosition* workspace);

}  // namespace h2o_prefill
