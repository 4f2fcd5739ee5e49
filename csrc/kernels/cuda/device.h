// What kernels ask of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace h2o_prefill {

inline cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

// Whether keys or values of `dim` elements are padded to 64 or 128, the rows of these kernels,
// without waste.
constexpr bool has_rows_of_sm90(int64_t dim) { return dim <= 64 || (dim > 96 && dim <= 128); }

}  // namespace h2o_prefill
