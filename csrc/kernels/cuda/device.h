// What kernels ask of the current device.
#pragma once

#include <cuda_runtime_api.h>

namespace h2o_prefill {

inline cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace h2o_prefill
