#include "kernels/cuda/chunk_end.cuh"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {

cudaError_t launch_chunk_end(const ChunkEndParams& params, cudaStream_t stream) {
  constexpr int kRows = 8;
  void (*const kernel)(ChunkEndParams) = params.select.candidates() <= kRows * select::kThreads
                                             ? &chunk_end::chunk_end_kernel<kRows>
                                             : &chunk_end::chunk_end_kernel<0>;
  return launch(kernel, dim3(static_cast<unsigned>(params.units)), dim3(select::kThreads),
                select::kSharedBytes, stream, params, /*overlapped=*/true);
}

}  // namespace h2o_prefill
