// Fusion of two partial attention results on the GPU (see softmax_state.h).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace h2o_prefill {

// All of one shape and dtype; lse natural, contiguous [B, H, T]. An output whose lse is -inf may be
// anything, a NaN included.
struct MergeStatesParams {
  HeadsView out_a;
  HeadsView out_b;
  HeadsView out;
  const float* lse_a;
  const float* lse_b;
  float* lse;
};

cudaError_t launch_merge_states(const MergeStatesParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
