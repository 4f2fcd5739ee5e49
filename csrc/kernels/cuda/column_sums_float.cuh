// Column sums of float32, without tensor cores: the same results as column_sums.cuh, for
// correctness.
//
// A block owns 32 keys, one a lane; its warps share the rows of a query tile, and their sums are
// added in order at the end of each head.
#pragma once

#include "kernels/cuda/attend_forward_float.cuh"
#include "kernels/cuda/column_sums.cuh"

namespace h2o_prefill::column_sums {

struct FloatShape {
  static constexpr int kKeys = 32;
  static constexpr int kWarpRows = 4;
  static constexpr int kRows = tile::kWarps * kWarpRows;
  static constexpr int kMaxDim = 256;

  // Key rows an odd number of words apart, query rows, the warps' sums.
  static constexpr int shared_bytes(int dim) {
    return 4 * (kKeys * (dim | 1) + kRows * dim + tile::kWarps * kKeys);
  }
};

template <bool kGathered>
__global__ void __launch_bounds__(tile::kThreads)
    column_sums_float_kernel(const __grid_constant__ Grid grid) {
  using S = FloatShape;
  const ColumnSumsParams& p = grid.params;
  ptx::wait_for_earlier_launches();
  const Part part = part_of_block<S::kKeys, kGathered>(grid);
  const int columns = kGathered ? static_cast<int>(p.memory.width) : part.chunk_rows;
  if (part.first_key >= columns) return;
  const int64_t unit = part.batch * p.key.heads + part.kv_head;

  const int dim = static_cast<int>(p.key.dim);
  const int key_stride = dim | 1;
  float* const key_tile = ptx::dynamic_shared<float>();
  float* const query_tile = key_tile + S::kKeys * key_stride;
  float* const warp_sums = query_tile + S::kRows * dim;
  attend::load_float_rows<S::kKeys>(
      key_tile, key_stride, p.key, part.batch, part.kv_head,
      kGathered ? 0 : p.rows.past + part.chunk_first + part.first_key, [&](int r) {
        const int key = part.first_key + r;
        if (key >= columns) return -1;
        return kGathered ? row_of_member(p, p.memory.of_unit(unit), key) : r;
      });

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int key = part.first_key + lane;
  float total = 0.0F;
  for (int head = part.first_head; head < part.end_head; ++head) {
    const float* const lse =
        p.lse + (part.batch * p.query.heads + head) * p.query.length + part.chunk_first;
    float sum = 0.0F;
    for (int first = part.first_row; first < part.end_row; first += S::kRows) {
      __syncthreads();
      attend::load_float_rows<S::kRows>(
          query_tile, dim, p.query, part.batch, head, part.chunk_first,
          [&](int r) { return first + r < part.end_row ? first + r : -1; });
      __syncthreads();
      float s[S::kWarpRows];
      attend::float_products(s, query_tile + warp * S::kWarpRows * dim, dim,
                             key_tile + lane * key_stride, dim);
#pragma unroll
      for (int r = 0; r < S::kWarpRows; ++r) {
        const int row = first + warp * S::kWarpRows + r;
        if (row >= part.end_row || (!kGathered && row < key)) continue;
        if (p.cap_scale != 0.0F) s[r] = tanhf(s[r] * p.cap_scale);
        sum += ptx::exp2(s[r] * p.scale_log2 - offset_of(lse[row]));
      }
    }
    __syncthreads();
    warp_sums[warp * S::kKeys + lane] = sum;
    __syncthreads();
    float of_head = 0.0F;
    for (int w = 0; w < tile::kWarps; ++w) of_head += warp_sums[w * S::kKeys + lane];
    total = p.reduce_max ? fmaxf(total, of_head) : total + of_head;
  }
  if (warp != 0 || key >= columns) return;
  const int first_column = kGathered ? 0 : part.chunk_first - static_cast<int>(p.rows.begin);
  store_total<kGathered>(grid, part, first_column + key, total);
}

}  // namespace h2o_prefill::column_sums
