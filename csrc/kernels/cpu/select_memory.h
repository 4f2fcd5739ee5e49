// Selection of one head's memory set.
#pragma once

#include <cstdint>
#include <vector>

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

// All heads of a layer, in parallel: contiguous memory [heads, memory_width], scores [heads,
// num_scores] (0 behind) and workspace [heads, memory_width + chunk_end - chunk_begin or more].
struct SelectMemoryHeads {
  int64_t heads;
  const int64_t* memory_counts;  // of each head
  int64_t memory_width;
  const float* scores;
  int64_t num_scores;
  ScoredPosition* workspace;
  int64_t workspace_width;
};

// first: of head 0, but for memory_count; its `selected` is [heads, the budget]. Returns how many
// positions each head got; they stand first, ascending, then -1.
std::vector<int64_t> select_memory_heads(const SelectMemoryParams& first,
                                         const SelectMemoryHeads& layer);

}  // namespace h2o_prefill
