// Selection of the memory sets of a layer on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace h2o_prefill {

// Candidates of a head are its old set, then [chunk_begin, chunk_end). The new set is, by rising
// position: the sinks [0, sink_tokens), the heavy_budget candidates with the highest scores between
// sinks and local window, and the local window [chunk_end - local_window, chunk_end); -1 behind.
// Of equal scores the lower position wins; a NaN ranks with the lowest finite score.
struct SelectMemoryParams {
  const float* scores;  // [heads, scores_length], rows scores_stride apart; 0 behind scores_length
  int64_t scores_stride;
  int64_t scores_length;
  const int32_t* memory;  // [heads, old_width]: ascending, then -1; entries from chunk_begin on do
                          // not count
  int64_t old_width;
  int32_t* selected;  // [heads, sink_tokens + local_window + heavy_budget]
  int64_t heads;      // batch rows times KV heads
  int64_t chunk_begin;
  int64_t chunk_end;
  int64_t local_window;
  int64_t heavy_budget;
  int64_t sink_tokens;
};

cudaError_t launch_select_memory(const SelectMemoryParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
