#include "kernels/cuda/cuda_kernels.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kernels/cuda/attend_forward_sm90.h"
#include "kernels/cuda/column_sums_grid.h"
#include "kernels/cuda/column_sums_sm90.h"

namespace h2o_prefill {
namespace {

constexpr CudaKernels kSm80{.arch = "sm_80",
                            .attend_forward = &launch_attend_forward,
                            .divide_column_sums = &divide_column_sums,
                            .column_sums = &launch_column_sums};

// Problems without a kernel for sm_90a run the kernels for sm_80.
constexpr CudaKernels kSm90a{
    .arch = "sm_90a",
    .attend_forward =
        [](const AttendForwardParams& params, cudaStream_t stream) {
          return has_attend_forward_sm90(params) ? launch_attend_forward_sm90(params, stream)
                                                 : launch_attend_forward(params, stream);
        },
    .divide_column_sums =
        [](const ColumnSumsParams& params) {
          return has_column_sums_sm90(params) ? divide_column_sums_sm90(params)
                                              : divide_column_sums(params);
        },
    .column_sums =
        [](const ColumnSumsParams& params, cudaStream_t stream) {
          return has_column_sums_sm90(params) ? launch_column_sums_sm90(params, stream)
                                              : launch_column_sums(params, stream);
        }};

bool is_sm90(int device) {
  int major = 0;
  int minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

const CudaKernels& choose(int device) {
  const char* const variable = std::getenv("H2O_PREFILL_CUDA_SM90");
  const std::string_view request = variable ? variable : "";
  if (request == "0") return kSm80;
  if (is_sm90(device) && has_code_for_sm90a()) return kSm90a;
  if (request == "1") {
    TORCH_WARN("H2O_PREFILL_CUDA_SM90=1 has no effect: ",
               is_sm90(device) ? "the library holds no code for sm_90a"
                               : "the GPU is not of compute capability 9.0");
  }
  return kSm80;
}

}  // namespace

const CudaKernels& cuda_kernels() {
  constexpr int kMostDevices = 64;
  static std::array<std::atomic<const CudaKernels*>, kMostDevices> chosen{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return kSm80;
  // Concurrent first calls make the same choice.
  const CudaKernels* kernels = chosen[device].load(std::memory_order_acquire);
  if (kernels == nullptr) {
    kernels = &choose(device);
    chosen[device].store(kernels, std::memory_order_release);
  }
  return *kernels;
}

TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  m.def("cuda_arch() -> str", [] { return std::string(cuda_kernels().arch); });
}

}  // namespace h2o_prefill
