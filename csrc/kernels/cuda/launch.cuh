// The only place that launches kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

namespace h2o_prefill {

// Shared memory that a kernel may use without opting in.
constexpr size_t kSharedBytesByDefault = 48 * 1024;

// Lets a kernel use so much shared memory on the current device.
inline cudaError_t allow_shared_bytes(const void* kernel, int device, size_t shared_bytes) {
  // The most that each kernel was launched with, by any thread, since less would take it away from
  // the others. Asking again would cost as much as a launch.
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = allowed.try_emplace({kernel, device}, kSharedBytesByDefault).first->second;
  if (shared_bytes <= most) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error == cudaSuccess) most = shared_bytes;
  return error;
}

// Runs kernel(params) on `stream` with `shared_bytes` of dynamic shared memory. An empty grid is no
// work, not an error. Errors of the launch itself are returned and not left for the next call.
// overlapped: every block of the kernel begins with ptx::wait_for_earlier_launches(), so it may
// start, up to there, while the launch before it ends. Compute capability 9.0 and up does that. The
// launch after it waits for this one alone, which must not end before the earlier ones.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, const Params& params, bool overlapped = false) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && overlapped) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = allow_shared_bytes(reinterpret_cast<const void*>(kernel), device, shared_bytes);
  }
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = major >= 9 ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, params);
  }
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace h2o_prefill
