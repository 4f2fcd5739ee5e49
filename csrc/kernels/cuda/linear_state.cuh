// The state of linear attention in the registers of a block, and what a chunk adds to it.
#pragma once

#include "kernels/cuda/linear_chunk.cuh"

namespace h2o_prefill::linear {

// The S^T of a warp: element [m][n][i] is of value column 16 m + accumulator_row(lane, i) of the
// warp's and of key column 8 n + accumulator_column(lane, i).
template <int kDim>
struct State {
  using S = Shape<kDim>;
  float at[S::kM][S::kUnits][4];

  // visit(element, key column, value column)
  template <typename Visit>
  __device__ __forceinline__ void for_each(int warp, int lane, const Visit& visit) {
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int n = 0; n < S::kUnits; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          visit(at[m][n][i], 8 * n + layout::accumulator_column(lane, i),
                16 * (warp * S::kM + m) + layout::accumulator_row(lane, i));
        }
      }
    }
  }

  // visit(the four floats of a lane, where they lie in a slot)
  template <typename Visit>
  __device__ __forceinline__ void for_each_of_slot(float* slot, int warp, int lane,
                                                   const Visit& visit) {
    float4* const floats = reinterpret_cast<float4*>(slot) + warp * S::kM * S::kUnits * 32 + lane;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int n = 0; n < S::kUnits; ++n) visit(at[m][n], floats[(m * S::kUnits + n) * 32]);
    }
  }

  __device__ __forceinline__ void multiply(float factor) {
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int n = 0; n < S::kUnits; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at[m][n][i] *= factor;
      }
    }
  }

  __device__ __forceinline__ float largest() const {
    float x = 0.0F;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int n = 0; n < S::kUnits; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x = fmaxf(x, fabsf(at[m][n][i]));
      }
    }
    return x;
  }
};

// A thread's share of the sum of the first `count` keys of a tile, decayed to the chunk's end.
template <DType dtype, int kDim>
__device__ __forceinline__ void sum_keys(Shared<kDim>& shared, const uint16_t* key, bool decays,
                                         int count) {
  using S = Shape<kDim>;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % (kDim / 2) * 2;
  const int part = thread / (kDim / 2);
  float low = 0.0F;
  float high = 0.0F;
#pragma unroll 4
  for (int row = part * S::kSumRows; row < min((part + 1) * S::kSumRows, count); ++row) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(
        key + tile::element_of<S::kUnits>(row, column / tile::kUnitElements) +
        column % tile::kUnitElements);
    const float weight = decays ? shared.decays.to_end[row] : 1.0F;
    low += weight * ptx::to_float<dtype>(static_cast<uint16_t>(pair));
    high += weight * ptx::to_float<dtype>(static_cast<uint16_t>(pair >> 16));
  }
  *reinterpret_cast<float2*>(&shared.key_sums[part][column]) = make_float2(low, high);
  if (thread == 0) shared.kept = decays ? shared.decays.kept() : 1.0F;
}

// Adds those shares to the normaliser; a thread has one column of it.
template <int kDim>
__device__ __forceinline__ void add_key_sums(Shared<kDim>& shared) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kDim) return;
  float sum = 0.0F;
#pragma unroll
  for (int part = 0; part < Shape<kDim>::kSumParts; ++part) sum += shared.key_sums[part][column];
  shared.normalizer[column] = shared.kept * shared.normalizer[column] + sum;
}

// S^T = kept S^T + (decayed V)^T K of a warp's value columns.
template <DType dtype, int kDim>
__device__ __forceinline__ void update_state(State<kDim>& state, const Shared<kDim>& shared,
                                             const uint16_t* key, const uint16_t* value,
                                             bool decays, int warp, int lane) {
  using S = Shape<kDim>;
  if (decays) state.multiply(shared.decays.kept());
  const tile::LaneRow<S::kUnits> value_lanes(layout::load_a_transposed_row(lane),
                                             layout::load_a_transposed_unit(lane));
  const tile::LaneRow<S::kUnits> key_lanes(layout::load_b_transposed_row(lane),
                                           layout::load_b_transposed_unit(lane));
#pragma unroll
  for (int k = 0; k < kRowTiles; ++k) {
    uint32_t a[S::kM][4];
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
      ptx::ldmatrix_x4_transposed(a[m], value + value_lanes.element(warp * S::kN + 2 * m, 2 * k));
    }
    if (decays) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = *reinterpret_cast<const float2*>(
            &shared.decays.to_end[16 * k + layout::a_column(lane, 2 * i)]);
#pragma unroll
        for (int m = 0; m < S::kM; ++m) {
          const uint32_t pair = a[m][i];
          a[m][i] = ptx::pack_pair<dtype>(
              weight.x * ptx::to_float<dtype>(static_cast<uint16_t>(pair)),
              weight.y * ptx::to_float<dtype>(static_cast<uint16_t>(pair >> 16)));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < S::kUnits; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_transposed(b, key + key_lanes.element(n, 2 * k));
      tile::multiply_pair<dtype>(state.at, n, a, b);
    }
  }
}

// The state and the normaliser that the call begins with, for the first piece.
template <int kDim>
__device__ __forceinline__ void read_start(State<kDim>& state, Shared<kDim>& shared,
                                           const LinearAttentionParams& p, const Piece& x, int warp,
                                           int lane) {
  const int dim = static_cast<int>(p.key.dim);
  const int value_dim = static_cast<int>(p.value.dim);
  const float* const from = p.state ? p.state + x.unit * dim * value_dim : nullptr;
  state.for_each(warp, lane, [&](float& element, int d, int v) {
    element = from && d < dim && v < value_dim ? from[d * value_dim + v] : 0.0F;
  });
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kDim) return;
  shared.normalizer[column] =
      p.normalizer && column < dim ? p.normalizer[x.unit * dim + column] : 0.0F;
}

}  // namespace h2o_prefill::linear
