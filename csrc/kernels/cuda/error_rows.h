// Errors of sparse prefill in the rows that are measured, on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"
#include "kernels/widening.h"

namespace h2o_prefill {

// Where the measured rows of a call are: rows[head, i] is row i of them, for each of `heads` heads,
// and limits[i] the number of keys that it sees, as AttendForwardParams has them.
struct ListMeasuredParams {
  MeasuredRows measured;
  int64_t heads;
  int32_t* rows;  // [heads, measured.size()]
  int32_t* limits;
  int64_t room;  // for limits
};

// Compares the measured rows of a chunk with exact attention, a part of launch_chunk_end(). The
// error of a KV head is the mean over these rows of its query heads of |out - exact|^2 / |exact|^2,
// 0 where both are 0.
struct RecordErrorsParams {
  HeadsView out;    // [B, Hq, Tq, Dv], of the call
  HeadsView exact;  // [B, Hq, measured.size(), Dv], of the same dtype
  MeasuredRows measured;
  int64_t chunk;
  int64_t kv_heads;
  WideningRule widening;
  float* errors;  // [B, Hkv, kErrorFields], updated
};

cudaError_t launch_list_measured(const ListMeasuredParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
