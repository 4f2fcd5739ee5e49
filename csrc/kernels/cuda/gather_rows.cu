#include "kernels/cuda/gather_rows.cuh"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_grid.h"

namespace h2o_prefill {
namespace {

template <typename Unit>
cudaError_t launch_in_units(const GatherRowsParams& params, cudaStream_t stream) {
  gather::Launch launch_params{params, params.row_bytes / static_cast<int64_t>(sizeof(Unit)), 1};
  while (launch_params.lanes < 32 && launch_params.lanes < launch_params.row_units) {
    launch_params.lanes *= 2;
  }
  const int64_t rows_of_cta = gather::kThreads / launch_params.lanes;
  const dim3 grid = grid_of_rows(params.count, rows_of_cta, params.batch * params.heads);
  return launch(&gather::gather_rows_kernel<Unit>, grid, dim3(gather::kThreads), 0, stream,
                launch_params);
}

}  // namespace

cudaError_t launch_gather_rows(const GatherRowsParams& params, cudaStream_t stream) {
  const uint64_t bits = reinterpret_cast<uint64_t>(params.from) |
                        reinterpret_cast<uint64_t>(params.to) |
                        static_cast<uint64_t>(params.stride_batch | params.stride_head |
                                              params.stride_row | params.row_bytes);
  if (bits % 16 == 0) return launch_in_units<gather::Unit16>(params, stream);
  if (bits % 4 == 0) return launch_in_units<uint32_t>(params, stream);
  return launch_in_units<uint16_t>(params, stream);
}

}  // namespace h2o_prefill
