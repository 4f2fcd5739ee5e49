// Column sums of attention weights on Hopper, of 16-bit dtypes: as launch_column_sums(), with the
// tensor core instructions of sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/column_sums.h"

namespace h2o_prefill {

// Whether launch_column_sums_sm90() takes these: a 16-bit dtype, and a head dim that is padded to
// 64 or 128 without waste.
bool has_column_sums_sm90(const ColumnSumsParams& params);

// Whether to take it on the current device: only by request, with H2O_PREFILL_CUDA_SM90=1 in the
// environment, on compute capability 9.0, and where the library holds code for sm_90a.
bool use_column_sums_sm90();

// As column_sums_partial_floats(), and never more than that.
int64_t column_sums_sm90_partial_floats(const ColumnSumsParams& params);

// cudaErrorInvalidValue where !has_column_sums_sm90(params).
cudaError_t launch_column_sums_sm90(const ColumnSumsParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
