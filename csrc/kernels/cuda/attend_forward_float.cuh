// Forward attention of float32, without tensor cores: the same tiles of keys and the same results
// as attend_forward.cuh, for correctness.
//
// A warp owns 4 query rows. For logits a lane has one key of the tile, for outputs every 32nd
// element of the row; probabilities go from one to the other by shuffles.
#pragma once

#include "kernels/cuda/forward_rows.cuh"
#include "kernels/cuda/warp.cuh"

namespace h2o_prefill::attend {

struct FloatShape {
  static constexpr int kWarpRows = 4;
  static constexpr int kRows = tile::kWarps * kWarpRows;
  static constexpr int kKeys = 32;
  static constexpr int kMaxDim = 256;
  static constexpr int kOutputs = kMaxDim / 32;  // of a lane and row
  using Causal = CausalKeys<kWarpRows, kKeys>;
  using Limited = LimitedKeys<kWarpRows, kKeys>;
  using Gathered = ListedKeys<kRows, kKeys>;

  // Query rows, key rows an odd number of words apart, value rows; what Gathered keeps.
  __host__ __device__ static constexpr int floats(int dim, int value_dim) {
    return (kRows * dim + kKeys * (dim | 1) + kKeys * value_dim + 3) / 4 * 4;
  }
  static constexpr int shared_bytes(int dim, int value_dim, bool gathered) {
    return 4 * floats(dim, value_dim) + (gathered ? Gathered::kSharedBytes : 0);
  }
};

// Copies rows of `view`, row_of(0 .. kRows - 1) of one head counted from `first`, by all threads;
// zeros where row_of is negative.
template <int kRows, typename RowOf>
__device__ __forceinline__ void load_float_rows(float* to, int to_stride, const HeadsView& view,
                                                int batch, int head, int64_t first,
                                                const RowOf& row_of) {
  const float* const from = tile::row_pointer<const float>(view, batch, head, first);
  const int dim = static_cast<int>(view.dim);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < kRows; r += tile::kWarps) {
    const int64_t row = row_of(r);
    for (int d = lane; d < dim; d += 32) {
      to[r * to_stride + d] = row < 0 ? 0.0F : from[row * view.stride_row + d];
    }
  }
}

// The products of `count` query rows `stride` apart with the lane's key.
template <int kCount>
__device__ __forceinline__ void float_products(float (&s)[kCount], const float* query, int stride,
                                               const float* key, int dim) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) s[r] = 0.0F;
  for (int d = 0; d < dim; ++d) {
    const float k = key[d];
#pragma unroll
    for (int r = 0; r < kCount; ++r) s[r] += query[r * stride + d] * k;
  }
}

template <KeyKind kKind>
__global__ void __launch_bounds__(tile::kThreads, 1)
    attend_forward_float_kernel(const __grid_constant__ ForwardGrid grid) {
  using Shape = FloatShape;
  constexpr int kWarpRows = Shape::kWarpRows;
  constexpr int kKeys = Shape::kKeys;
  constexpr bool kGathered = kKind == KeyKind::kGathered;
  using Keys = KeysOf<Shape, kKind>;
  const AttendForwardParams& p = grid.params;
  ptx::wait_for_earlier_launches();
  const RowTile rows = row_tile<Shape::kRows, kKind>(grid, blockIdx.x);
  if (rows.count <= 0) return;

  const int dim = static_cast<int>(p.key.dim);
  const int value_dim = static_cast<int>(p.value.dim);
  const int key_stride = dim | 1;
  float* const query_tile = ptx::dynamic_shared<float>();
  float* const key_tile = query_tile + Shape::kRows * dim;
  float* const value_tile = key_tile + kKeys * key_stride;
  const int thread = static_cast<int>(threadIdx.x);
  const Keys keys(p, rows, query_tile + Shape::floats(dim, value_dim));
  load_float_rows<Shape::kRows>(query_tile, dim, p.query, rows.batch, rows.head, rows.first,
                                [&](int r) { return r < rows.count ? r : -1; });
  if constexpr (kGathered) {
    __syncthreads();
    keys.store(0, keys.prepare(0, thread));
    keys.store(1, keys.prepare(1, thread));
  }

  const int lane = thread % 32;
  const int warp_row = thread / 32 * kWarpRows;
  float maximum[kWarpRows];
  float sum[kWarpRows] = {};
  float out[kWarpRows][Shape::kOutputs] = {};
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) maximum[r] = kNegInf;

  const int64_t state = state_row(p.query, rows) + warp_row;
  [[maybe_unused]] const auto store_memory_lse = [&] {
    if (!p.memory_lse) return;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      float weight = 1.0F;
      float lse = natural_lse(maximum[r], warp::sum(sum[r]));
      add_sink(p, rows.head, weight, lse);
      if (lane == 0 && warp_row + r < rows.count) p.memory_lse[state + r] = lse;
    }
  };

#pragma unroll 1
  for (int j = 0; j < keys.tiles; ++j) {
    if constexpr (kGathered) {
      if (j == keys.memory_tiles) store_memory_lse();
    }
    __syncthreads();
    const auto row_of = [&](int r) { return keys.row_of(j, r); };
    load_float_rows<kKeys>(key_tile, key_stride, p.key, rows.batch, rows.kv_head, rows.key_begin,
                           row_of);
    load_float_rows<kKeys>(value_tile, value_dim, p.value, rows.batch, rows.kv_head, rows.key_begin,
                           row_of);
    __syncthreads();
    float s[kWarpRows];
    float_products(s, query_tile + warp_row * dim, dim, key_tile + lane * key_stride, dim);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (p.cap_scale != 0.0F) s[r] = tanhf(s[r] * p.cap_scale);
      s[r] = keys.is_visible(j, lane, warp_row + r) ? s[r] * p.scale_log2 : kNegInf;
      const float before = maximum[r];
      maximum[r] = fmaxf(before, warp::max(s[r]));
      const float offset = maximum[r] == kNegInf ? 0.0F : maximum[r];
      const float factor = ptx::exp2(before - offset);
      s[r] = ptx::exp2(s[r] - offset);
      sum[r] = sum[r] * factor + s[r];
#pragma unroll
      for (int i = 0; i < Shape::kOutputs; ++i) out[r][i] *= factor;
    }
    for (int key = 0; key < kKeys; ++key) {
      float weight[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) weight[r] = __shfl_sync(0xFFFFFFFFU, s[r], key);
#pragma unroll
      for (int i = 0; i < Shape::kOutputs; ++i) {
        if (32 * i + lane >= value_dim) continue;
        const float v = value_tile[key * value_dim + 32 * i + lane];
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) out[r][i] += weight[r] * v;
      }
    }
    if constexpr (kGathered) {
      __syncthreads();
      keys.store(j + 2, keys.prepare(j + 2, thread));
    }
  }
  if constexpr (kGathered) {
    if (keys.tiles == keys.memory_tiles) store_memory_lse();
  }

#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const float denominator = warp::sum(sum[r]);
    if (warp_row + r >= rows.count) continue;
    float of_new = inverse_denominator(denominator);
    float of_old = 0.0F;
    float lse = natural_lse(maximum[r], denominator);
    if (p.merge_with_out) {
      const MergeWeights weight = merge_weights(lse, p.lse[state + r]);
      lse = weight.lse;
      of_new *= weight.a;
      of_old = weight.b;
      __syncwarp();  // all lanes have read lse
    } else {
      add_sink(p, rows.head, of_new, lse);
    }
    if (p.lse && lane == 0) p.lse[state + r] = lse;
    float* const result =
        tile::row_pointer<float>(p.out, rows.batch, rows.head, rows.first + warp_row + r);
#pragma unroll
    for (int i = 0; i < Shape::kOutputs; ++i) {
      const int d = 32 * i + lane;
      if (d >= value_dim) continue;
      result[d] = out[r][i] * of_new + (of_old != 0.0F ? of_old * result[d] : 0.0F);
    }
  }
}

}  // namespace h2o_prefill::attend
