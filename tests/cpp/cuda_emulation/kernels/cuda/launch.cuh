// Stands in for csrc/kernels/cuda/launch.cuh: runs the kernel at once, by the rules of the hardware
// about sizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda_emulation/counters.h"
#include "cuda_emulation/scheduler.h"

namespace h2o_prefill {

using cuda_emulation::kMaxSharedBytes;

template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t /*stream*/, const Params& params, bool overlapped = false) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (shared_bytes > cuda_emulation::max_shared_bytes) return cudaErrorInvalidValue;
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x > 0x7FFFFFFF || grid.y > 0xFFFF || grid.z > 0xFFFF) {
    return cudaErrorInvalidConfiguration;
  }
  cuda_emulation::threads_that_waited = 0;
  cuda_emulation::run_grid(grid, block, shared_bytes, [&] { kernel(params); });
  const size_t waited = cuda_emulation::threads_that_waited;
  // Translated PTX does not count; no grid may end before the launches before it have ended.
  if (overlapped && waited != 0 && waited != threads * grid.x * grid.y * grid.z) {
    cuda_emulation::fail("%zu threads of an overlapped launch waited for earlier launches", waited);
  }
  return cudaSuccess;
}

}  // namespace h2o_prefill
