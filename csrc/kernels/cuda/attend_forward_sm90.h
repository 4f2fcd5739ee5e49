// Forward attention on Hopper, of 16-bit dtypes: as launch_attend_forward(), with the tensor core
// instructions of sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/attend_forward.h"

namespace h2o_prefill {

// Whether launch_attend_forward_sm90() takes these: a 16-bit dtype, head dims that are padded to 64
// or 128 without waste, and a scale above 0.
bool has_attend_forward_sm90(const AttendForwardParams& params);

// Whether to take it on the current device, as use_sm90() says.
bool use_attend_forward_sm90();

// cudaErrorInvalidValue where !has_attend_forward_sm90(params).
cudaError_t launch_attend_forward_sm90(const AttendForwardParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
