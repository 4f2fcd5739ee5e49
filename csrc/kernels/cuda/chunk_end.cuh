// The end of a chunk: sums, errors and selection of a unit by one block, which has 32 warps so that
// the first two take little longer than one access to memory.
#pragma once

#include "kernels/cuda/chunk_end.h"
#include "kernels/cuda/column_sums_reduce.cuh"
#include "kernels/cuda/select_memory.cuh"

namespace h2o_prefill::chunk_end {

__device__ __forceinline__ float element(const HeadsView& view, int64_t b, int64_t h, int64_t t,
                                         int64_t d) {
  if (view.dtype == DType::kFloat32) return tile::row_pointer<const float>(view, b, h, t)[d];
  const uint16_t bits = tile::row_pointer<const uint16_t>(view, b, h, t)[d];
  return view.dtype == DType::kBFloat16 ? ptx::to_float<DType::kBFloat16>(bits)
                                        : ptx::to_float<DType::kFloat16>(bits);
}

// A warp has a row of a query head.
__device__ __forceinline__ void record_error(const RecordErrorsParams& p, int64_t unit) {
  float* const sums = ptx::dynamic_shared<float>();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t b = unit / p.kv_heads;
  const int64_t group = p.out.heads / p.kv_heads;
  const int64_t first_head = unit % p.kv_heads * group;
  const int64_t first = p.measured.before(p.chunk);
  const int64_t rows = p.measured.count_of(p.measured.chunk(p.chunk)) * group;
  float sum = 0.0F;
  for (int64_t i = warp; i < rows; i += select::kWarps) {
    const int64_t head = first_head + i % group;
    const int64_t index = first + i / group;
    const int64_t row = p.measured.row(index);
    float missed = 0.0F;
    float whole = 0.0F;
    for (int64_t d = lane; d < p.out.dim; d += 32) {
      const float exact = element(p.exact, b, head, index, d);
      const float difference = element(p.out, b, head, row, d) - exact;
      missed += difference * difference;
      whole += exact * exact;
    }
    missed = warp::sum(missed);
    whole = warp::sum(whole);
    if (whole > 0.0F) sum += missed / whole;
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double error = 0.0;
  for (int w = 0; w < select::kWarps; ++w) error += static_cast<double>(sums[w]);
  p.widening.record(p.errors + unit * kErrorFields, error / static_cast<double>(rows));
}

// A block has a unit: it reads nothing that another one writes.
template <int kRows>
__global__ void __launch_bounds__(select::kThreads, 1)
    chunk_end_kernel(__grid_constant__ const ChunkEndParams p) {
  ptx::wait_for_earlier_launches();
  const int64_t unit = blockIdx.x;
  if (p.sums.params.sums) {
    const int columns = static_cast<int>(p.sums.params.memory.width);
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += select::kThreads) {
      column_sums::reduce_column<true>(p.sums, unit, i);
    }
  }
  if (p.errors.errors) record_error(p.errors, unit);
  __syncthreads();
  if (p.select.selected) select::select_memory<kRows>(p.select, unit);
}

}  // namespace h2o_prefill::chunk_end
