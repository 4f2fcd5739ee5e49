// Keys or values of one request, copied out of its pages on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace h2o_prefill {

// Row t of out is row t % page_size of page table[t / page_size]; 0 where there is no such page.
// Rows are units of 16 bytes, at multiples of which they begin.
struct GatherPagesParams {
  const void* pages;   // [num_pages, heads, page_size, row_units]
  int64_t strides[3];  // of its first dimensions, in units
  int64_t num_pages;
  int64_t page_size;
  const int32_t* table;
  void* out;  // [heads, total, row_units]
  int64_t heads;
  int64_t total;
  int64_t row_units;  // at most kGatherThreads
};

inline constexpr int kGatherThreads = 256;

cudaError_t launch_gather_pages(const GatherPagesParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
