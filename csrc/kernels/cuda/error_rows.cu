#include "kernels/cuda/error_rows.cuh"

#include <algorithm>

#include "kernels/cuda/launch.cuh"

namespace h2o_prefill {

cudaError_t launch_list_measured(const ListMeasuredParams& params, cudaStream_t stream) {
  const int64_t numbers = std::max(params.heads * params.measured.size(), params.room);
  const int64_t blocks = divide_up<int64_t>(numbers, error_rows::kListThreads);
  return launch(&error_rows::list_measured_kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(error_rows::kListThreads), 0, stream, params);
}

}  // namespace h2o_prefill
