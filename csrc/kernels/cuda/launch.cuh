// The only place that launches kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace h2o_prefill {

// Shared memory that a kernel may use without opting in.
constexpr size_t kSharedBytesByDefault = 48 * 1024;

// Runs kernel(params) on `stream` with `shared_bytes` of dynamic shared memory. An empty grid is no
// work, not an error. Errors of the launch itself are returned and not left for the next call.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, const Params& params) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (shared_bytes > kSharedBytesByDefault) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) {
      cudaGetLastError();
      return error;
    }
  }
  kernel<<<grid, block, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace h2o_prefill
