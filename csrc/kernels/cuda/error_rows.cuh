// A thread lists a row; a block has a KV head of a batch row, and a warp a row of a query head.
#pragma once

#include "kernels/cuda/error_rows.h"
#include "kernels/cuda/tile.cuh"
#include "kernels/cuda/warp.cuh"

namespace h2o_prefill::error_rows {

constexpr int kListThreads = 256;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kSharedBytes = kWarps * static_cast<int>(sizeof(float));

__global__ void __launch_bounds__(kListThreads)
    list_measured_kernel(__grid_constant__ const ListMeasuredParams p) {
  const int64_t size = p.measured.size();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kListThreads + threadIdx.x;
  if (i < p.heads * size) p.rows[i] = static_cast<int32_t>(p.measured.row(i % size));
  if (i < p.room) {
    const int64_t row = p.measured.row(i < size ? i : size - 1);
    p.limits[i] = static_cast<int32_t>(p.measured.past + row + 1);
  }
}

template <DType dtype>
__device__ __forceinline__ float element(const HeadsView& view, int64_t b, int64_t h, int64_t t,
                                         int64_t d) {
  if constexpr (dtype == DType::kFloat32) {
    return tile::row_pointer<const float>(view, b, h, t)[d];
  } else {
    return ptx::to_float<dtype>(tile::row_pointer<const uint16_t>(view, b, h, t)[d]);
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads)
    record_errors_kernel(__grid_constant__ const RecordErrorsParams p) {
  ptx::wait_for_earlier_launches();
  float* const sums = ptx::dynamic_shared<float>();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t b = blockIdx.x / p.kv_heads;
  const int64_t group = p.out.heads / p.kv_heads;
  const int64_t first_head = blockIdx.x % p.kv_heads * group;
  const int64_t first = p.measured.before(p.chunk);
  const int64_t rows = p.measured.count_of(p.measured.chunk(p.chunk)) * group;
  float sum = 0.0F;
  for (int64_t i = warp; i < rows; i += kWarps) {
    const int64_t head = first_head + i % group;
    const int64_t index = first + i / group;
    const int64_t row = p.measured.row(index);
    float missed = 0.0F;
    float whole = 0.0F;
    for (int64_t d = lane; d < p.out.dim; d += 32) {
      const float exact = element<dtype>(p.exact, b, head, index, d);
      const float difference = element<dtype>(p.out, b, head, row, d) - exact;
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
  for (int w = 0; w < kWarps; ++w) error += static_cast<double>(sums[w]);
  p.widening.record(p.errors + blockIdx.x * kErrorFields, error / static_cast<double>(rows));
}

}  // namespace h2o_prefill::error_rows
