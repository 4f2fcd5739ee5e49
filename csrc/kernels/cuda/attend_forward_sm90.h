// Forward attention on Hopper, of 16-bit dtypes: as launch_attend_forward(), with the tensor core
// instructions of sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/attend_forward.h"

namespace h2o_prefill {

// Whether launch_attend_forward_sm90() takes these: a 16-bit dtype, head dims that are padded to 64
// or 128 without waste, and a scale above 0.
bool has_attend_forward_sm90(const AttendForwardParams& params);

// cudaErrorInvalidValue where !has_attend_forward_sm90(params).
cudaError_t launch_attend_forward_sm90(const AttendForwardParams& params, cudaStream_t stream);

// Whether the library holds kernels of sm_90a that the current device can run. Code for other
// architectures is an empty kernel, which takes hardly a register.
bool has_code_for_sm90a();

}  // namespace h2o_prefill
