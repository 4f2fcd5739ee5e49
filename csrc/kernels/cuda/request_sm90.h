// When the kernels of sm_90a are taken.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

namespace h2o_prefill {

// Whether to launch them on the current device, of which `kernel` is one that takes more than
// `least_registers`: by request alone, with H2O_PREFILL_CUDA_SM90=1 in the environment, on compute
// capability 9.0, and where the library holds code for sm_90a. Code for other architectures is an
// empty kernel, which takes hardly a register.
template <typename Kernel>
bool use_sm90(Kernel kernel, int least_registers) {
  const char* const requested = std::getenv("H2O_PREFILL_CUDA_SM90");
  if (requested == nullptr || std::strcmp(requested, "1") != 0) return false;
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return false;
  }
  if (major != 9 || minor != 0) return false;
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess &&
         attributes.numRegs > least_registers;
}

// Whether keys or values of `dim` elements are padded to 64 or 128, the rows of these kernels,
// without waste.
constexpr bool has_rows_of_sm90(int64_t dim) { return dim <= 64 || (dim > 96 && dim <= 128); }

}  // namespace h2o_prefill
