#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/select_memory.cuh"

namespace h2o_prefill {

cudaError_t launch_select_memory(const SelectMemoryParams& params, cudaStream_t stream) {
  constexpr int kRows = 16;
  if (params.units == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(params.units));
  const dim3 block(select::kThreads);
  const auto kernel = params.candidates() <= kRows * select::kThreads
                          ? &select::select_memory_kernel<kRows>
                          : &select::select_memory_kernel<0>;
  return launch(kernel, grid, block, select::kSharedBytes, stream, params);
}

}  // namespace h2o_prefill
