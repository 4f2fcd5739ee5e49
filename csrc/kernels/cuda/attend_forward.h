// Forward attention on CUDA: every op's outputs and logarithmic denominators come from here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/key_sets.h"
#include "kernels/params.h"

namespace h2o_prefill {

// Which keys the rows of a pass see (see key_sets.h):
//
//   causal    the keys of a CausalRange;
//   limits    keys [0, limits[row]), rising by row;
//   gathered  the members of their head's memory set, and the keys that their block recalls, unless
//             these are in the set or not before the pass's rows.
//
// Positions outside of the history are absent. Rows of tensors may lie anywhere as long as they
// begin at a multiple of 16 bytes, for 16-bit dtypes, less than 2^31 apart; the last dimension is
// contiguous, at most 256 long, and a multiple of 8.
constexpr int64_t kLimitRows = 128;

// Blocks of the kernels of sm_80 that fill the GPUs that these are for.
constexpr int64_t kManyBlocks = 256;

struct AttendForwardParams {
  HeadsView query;   // [B, Hq, Tq, D]
  HeadsView key;     // [B, Hkv, T, D], the history
  HeadsView value;   // [B, Hkv, T, Dv]
  HeadsView out;     // [B, Hq, Tq, Dv], dtype of the query
  float* lse;        // [B, Hq, Tq], natural; may be null unless merge_with_out
  float scale_log2;  // softmax scale times log2(e), or softcap times log2(e)
  // The softmax scale over the softcap: products become tanh(product cap_scale) before they are
  // scaled. 0: they do not.
  float cap_scale;
  // [Hq], natural: the logit of a key of value 0 that every row sees besides; null: none. A pass
  // that merges counts it in memory_lse alone, since the other side has it.
  const float* sinks;
  RowRange rows;
  bool gathered;
  CausalRange causal;     // unless gathered or limited
  const int32_t* limits;  // [Tq], then the last one again up to whole tiles of kLimitRows; or null
  int limits_stride;      // from one batch row to the next; 0: they have the same
  MemorySetView memory;   // if gathered
  RecallView recall;
  float* memory_lse;    // [B, Hq, Tq], natural: over the memory sets alone; null: not wanted
  bool merge_with_out;  // fuses the result with `out` and `lse`
};

// Asynchronous on `stream`; allocates nothing.
cudaError_t launch_attend_forward(const AttendForwardParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
