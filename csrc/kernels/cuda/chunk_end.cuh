// The end of a chunk: sums, errors and selection of a unit by one block, which has 32 warps so that
// the first two take little longer than one access to memory.
#pragma once

#include <type_traits>

#include "kernels/cuda/chunk_end.h"
#include "kernels/cuda/column_sums_reduce.cuh"
#include "kernels/cuda/select_memory.cuh"

namespace h2o_prefill::chunk_end {

// The error of measured row `index`, row `row` of the call, by the lanes of a warp.
template <DType dtype>
__device__ __forceinline__ float error_of_row(const RecordErrorsParams& p, int64_t b, int64_t head,
                                              int64_t index, int64_t row) {
  using Element = std::conditional_t<dtype == DType::kFloat32, float, uint16_t>;
  const auto number = [](Element x) {
    if constexpr (dtype == DType::kFloat32) {
      return x;
    } else {
      return ptx::to_float<dtype>(x);
    }
  };
  const Element* const out = tile::row_pointer<const Element>(p.out, b, head, row);
  const Element* const exact = tile::row_pointer<const Element>(p.exact, b, head, index);
  float missed = 0.0F;
  float whole = 0.0F;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < static_cast<int>(p.out.dim); d += 32) {
    const float y = number(exact[d]);
    const float difference = number(out[d]) - y;
    missed += difference * difference;
    whole += y * y;
  }
  missed = warp::sum(missed);
  whole = warp::sum(whole);
  return whole > 0.0F ? missed / whole : 0.0F;
}

// A warp has a row of a query head.
__device__ __forceinline__ void record_error(const RecordErrorsParams& p, int64_t unit) {
  float* const sums = ptx::dynamic_shared<float>();
  const int warp = static_cast<int>(threadIdx.x) / 32;
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
    const DType dtype = p.out.dtype;
    sum += dtype == DType::kFloat32    ? error_of_row<DType::kFloat32>(p, b, head, index, row)
           : dtype == DType::kBFloat16 ? error_of_row<DType::kBFloat16>(p, b, head, index, row)
                                       : error_of_row<DType::kFloat16>(p, b, head, index, row);
  }
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
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
