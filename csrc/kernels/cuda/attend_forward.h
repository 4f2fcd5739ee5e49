// Forward attention on CUDA: every op's outputs and logarithmic denominators come from here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"

namespace h2o_prefill {

// Which keys a row of the call sees. Row i of `query` stands at the absolute position past + i.
//
//   causal    keys [begin, past + i], where begin is that of the row's chunk, past + (i /
//             chunk_size) * chunk_size, or 0 where chunk_size is 0;
//   gathered  keys indices[b, h, :], and those recalled for the row's block that are visible to it,
//             lie before chunk_begin and are not among the indices.
//
// Rows of tensors may lie anywhere as long as they begin at a multiple of 16 bytes, for 16-bit
// dtypes; the last dimension is contiguous, at most 256 long, and a multiple of 8.
struct AttendForwardParams {
  HeadsView query;   // [B, Hq, Tq, D]
  HeadsView key;     // [B, Hkv, T, D], the history
  HeadsView value;   // [B, Hkv, T, Dv]
  HeadsView out;     // [B, Hq, Tq, Dv], dtype of the query
  float* lse;        // [B, Hq, Tq], natural; may be null unless merge_with_out
  float scale_log2;  // softmax scale times log2(e)

  int64_t row_begin;  // rows [row_begin, row_begin + rows) of the call
  int64_t rows;
  int64_t past;  // absolute position of row 0 of the call

  int64_t chunk_size;  // causal

  bool gathered;
  const int32_t* indices;  // [B, Hkv, width], ascending, -1 at the end
  int64_t width;
  const int32_t* recall_offsets;  // [B * recall_blocks + 1]; null: no recall
  const int32_t* recall_positions;
  const int32_t* recall_visible_from;
  int64_t recall_block;   // rows of a block; blocks are counted from row 0 of the call
  int64_t recall_blocks;  // of a batch row
  int64_t chunk_begin;    // absolute position where the rows' chunk begins
  float* memory_lse;      // [B, Hq, Tq], natural: over the indices alone; null: not wanted
  bool merge_with_out;    // the result is fused with what `out` and `lse` hold
};

// Asynchronous on `stream`; allocates nothing.
cudaError_t launch_attend_forward(const AttendForwardParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
