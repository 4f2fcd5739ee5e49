// Which kernels a GPU runs: one table of launchers an architecture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/column_sums.h"

namespace h2o_prefill {

struct CudaKernels {
  const char* arch;
  cudaError_t (*attend_forward)(const AttendForwardParams&, cudaStream_t);
  column_sums::Grid (*divide_column_sums)(const ColumnSumsParams&);
  cudaError_t (*column_sums)(const ColumnSumsParams&, cudaStream_t);
};

// The kernels for the current device, chosen once per device: sm_90a on compute capability 9.0, for
// the problems that they support, if the library holds code for it; sm_80 elsewhere, and with
// H2O_PREFILL_CUDA_SM90=0 in the environment.
const CudaKernels& cuda_kernels();

}  // namespace h2o_prefill
