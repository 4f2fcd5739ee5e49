// Copying rows by index on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace h2o_prefill {

// Row i of head (b, h) of `to` becomes row indices[b, h, i] of `from`, and zeros where that is no
// row: -1, or outside of [0, length), which the device cannot report.
struct GatherRowsParams {
  const void* from;  // [batch, heads, length, row_bytes], strides in bytes
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_row;
  int64_t length;
  const int32_t* indices;  // [batch, heads, count], contiguous
  void* to;                // [batch, heads, count, row_bytes], contiguous
  int64_t batch;
  int64_t heads;
  int64_t count;
  int64_t row_bytes;
};

cudaError_t launch_gather_rows(const GatherRowsParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
