// Column sums of attention weights on Hopper, of 16-bit dtypes: as launch_column_sums(), with the
// tensor core instructions of sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/column_sums.h"

namespace h2o_prefill {

// Whether launch_column_sums_sm90() takes these: a 16-bit dtype, and a head dim that is padded to
// 64 or 128 without waste.
bool has_column_sums_sm90(const ColumnSumsParams& params);

// As divide_column_sums(), for launch_column_sums_sm90().
column_sums::Grid divide_column_sums_sm90(const ColumnSumsParams& params);

// cudaErrorInvalidValue where !has_column_sums_sm90(params), too.
cudaError_t launch_column_sums_sm90(const ColumnSumsParams& params, cudaStream_t stream);

}  // namespace h2o_prefill
