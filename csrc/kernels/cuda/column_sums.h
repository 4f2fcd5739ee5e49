// Column sums of attention weights on CUDA: sum over queries i of exp(z_ij - lse_i) for each key j.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/key_sets.h"
#include "kernels/params.h"

namespace h2o_prefill {

// Two kinds of key sets, as in AttendForwardParams:
//
//   causal    in chunks: causal.chunk_size >= 1, and causal.begin is the position of the first row.
//             sums[b, h, p] is the sum of the key at position p.
//   gathered  the members of the memory sets, seen by all rows. sums[b, h, j] is the sum of member
//             j and 0 where there is none. If scatter_add, parts of the sums stay in `partial`, by
//             which launch_chunk_end() lets sums[b, h, memory[b, h, j]] grow.
//
// A KV head's sum adds its query heads' sums, or is their maximum if reduce_max. The order
// of additions depends on shapes and usual_width only: results are the same to the bit, on any GPU.
struct ColumnSumsParams {
  HeadsView query;   // [B, Hq, Tq, D]
  HeadsView key;     // [B, Hkv, T, D], the history
  const float* lse;  // [B, Hq, Tq], natural, over the same keys; -inf: the row counts nothing
  float scale_log2;  // as AttendForwardParams have it
  float cap_scale;
  RowRange rows;
  bool gathered;
  CausalRange causal;    // unless gathered
  MemorySetView memory;  // if gathered
  int64_t usual_width;   // members of most memory sets, which have room for more; 0: memory.width
  float* sums;
  int64_t sums_stride;  // floats of a (batch row, KV head)
  bool scatter_add;     // gathered
  bool reduce_max;
  float* partial;  // workspace of as many floats as the grid asks for
};

namespace column_sums {
struct Grid;
}

// How launch_column_sums() divides the work, given the workspace with which it spreads few keys
// over the whole GPU.
column_sums::Grid divide_column_sums(const ColumnSumsParams& params);

// Asynchronous on `stream`; allocates nothing. Without `partial` chunks are not shared out, which
// changes the order of additions, and gathered keys are cudaErrorInvalidValue.
cudaError_t launch_column_sums(const ColumnSumsParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
