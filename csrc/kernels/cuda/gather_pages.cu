#include "kernels/cuda/gather_pages.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/host_device.h"

namespace h2o_prefill {

// A thread copies 16 bytes.
__global__ void __launch_bounds__(kGatherThreads)
    gather_pages_kernel(__grid_constant__ const GatherPagesParams p) {
  const int units = static_cast<int>(p.row_units), rows = kGatherThreads / units;
  const int row = static_cast<int>(threadIdx.x) / units;
  const int unit = static_cast<int>(threadIdx.x) % units;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * rows + row, head = blockIdx.y;
  if (row >= rows || t >= p.total) return;
  // Divisions of 64 bits would take longer than the copy.
  const auto position = static_cast<uint32_t>(t), size = static_cast<uint32_t>(p.page_size);
  const int64_t page = p.table[position / size];
  float4 copy{};
  if (page >= 0 && page < p.num_pages) {
    const int64_t first = page * p.strides[0] + head * p.strides[1];
    copy = static_cast<const float4*>(p.pages)[first + position % size * p.strides[2] + unit];
  }
  static_cast<float4*>(p.out)[(head * p.total + t) * units + unit] = copy;
}

cudaError_t launch_gather_pages(const GatherPagesParams& params, cudaStream_t stream) {
  const int64_t blocks = divide_up(params.total, kGatherThreads / params.row_units);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(params.heads));
  return launch(&gather_pages_kernel, grid, dim3(kGatherThreads), 0, stream, params);
}

}  // namespace h2o_prefill
