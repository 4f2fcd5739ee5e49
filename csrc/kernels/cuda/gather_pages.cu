#include "kernels/cuda/gather_pages.cuh"

#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {

cudaError_t launch_gather_pages(const GatherPagesParams& params, cudaStream_t stream) {
  const int64_t blocks = divide_up(params.total, kGatherThreads / params.row_units);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.heads));
  return launch(&gather_pages::gather_pages_kernel, grid, dim3(kGatherThreads), 0, stream, params);
}

}  // namespace h2o_prefill
