#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/select_memory.cuh"

namespace h2o_prefill {
namespace {

template <int kThreads, int kRows>
cudaError_t launch_threads(const SelectMemoryParams& params, cudaStream_t stream) {
  return launch(&select::select_memory_kernel<kThreads, kRows>,
                dim3(static_cast<unsigned>(params.units)), dim3(kThreads),
                select::shared_bytes(kThreads), stream, params, /*overlapped=*/true);
}

}  // namespace

cudaError_t launch_select_memory(const SelectMemoryParams& params, cudaStream_t stream) {
  constexpr int kRows = 16;
  if (params.units == 0) return cudaSuccess;
  if (params.candidates() <= kRows * 256) return launch_threads<256, kRows>(params, stream);
  if (params.candidates() <= kRows * 512) return launch_threads<512, kRows>(params, stream);
  return launch_threads<512, 0>(params, stream);
}

}  // namespace h2o_prefill
