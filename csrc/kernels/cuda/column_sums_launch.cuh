// Launching a column sums kernel over its grid.
#pragma once

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/launch.cuh"

namespace h2o_prefill::column_sums {

// Launches a kernel over a grid, and reduces the partial sums of tiles that blocks have shared, but
// for those that launch_chunk_end() adds to scores.
// Where its blocks distribute the parts of the grid themselves, there are at most most_blocks.
template <bool kGathered>
cudaError_t launch_grid(void (*kernel)(Grid), int threads, int shared_bytes, const Grid& grid,
                        cudaStream_t stream, int64_t most_blocks = INT32_MAX) {
  const int64_t blocks = grid.blocks() < most_blocks ? grid.blocks() : most_blocks;
  if (grid.blocks() == 0) return cudaSuccess;
  if (grid.has_parts() && !grid.params.partial) return cudaErrorInvalidValue;
  if (grid.blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t error = launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads),
                                   shared_bytes, stream, grid, /*overlapped=*/true);
  if (error != cudaSuccess || !grid.has_parts() || grid.params.scatter_add) return error;
  const int64_t reducing = grid.units * divide_up<int64_t>(columns_of(grid.params), kReduceThreads);
  return launch(&reduce_partial_kernel<kGathered>, dim3(static_cast<unsigned>(reducing)),
                dim3(kReduceThreads), 0, stream, grid, /*overlapped=*/true);
}

}  // namespace h2o_prefill::column_sums
