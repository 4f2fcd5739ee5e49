// Column sums of attention weights on CUDA: sum over queries i of exp(z_ij - lse_i) for each key j.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"

namespace h2o_prefill {

// Two kinds of key sets, as in AttendForwardParams:
//
//   causal    rows and keys of the same chunk, key not behind the row; chunk_size >= 1 and
//   row_begin
//             a multiple of it. sums[b, h, past + i] is the sum of the key at row i's position.
//   gathered  keys indices[b, h, j], seen by all rows. sums[b, h, j] is the sum of key j and 0
//   where
//             the index is -1, or sums[b, h, indices[b, h, j]] grows by it if scatter_add.
//
// The sum of a KV head is that of its query heads' sums, or their maximum if reduce_max. The order
// of additions depends on shapes only: results are the same to the bit, on any GPU.
struct ColumnSumsParams {
  HeadsView query;   // [B, Hq, Tq, D]
  HeadsView key;     // [B, Hkv, T, D], the history
  const float* lse;  // [B, Hq, Tq], natural, over the same keys; -inf: the row counts nothing
  float scale_log2;  // softmax scale times log2(e)

  int64_t row_begin;  // rows [row_begin, row_begin + rows) of the call
  int64_t rows;
  int64_t past;  // absolute position of row 0 of the call

  int64_t chunk_size;  // causal

  bool gathered;
  const int32_t* indices;  // [B, Hkv, width], ascending, -1 at the end
  int64_t width;

  float* sums;
  int64_t sums_stride;  // floats of a (batch row, KV head)
  bool scatter_add;     // gathered
  bool reduce_max;

  float* partial;  // column_sums_partial_floats() floats, or null
};

// Floats of workspace with which the launch spreads few keys over the whole GPU; 0 where the keys
// are many.
int64_t column_sums_partial_floats(const ColumnSumsParams& params);

// Asynchronous on `stream`; allocates nothing. The same `partial` given or not changes the order of
// additions.
cudaError_t launch_column_sums(const ColumnSumsParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
