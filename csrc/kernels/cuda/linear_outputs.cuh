// Outputs of a chunk of linear attention: weights of its keys, what the state adds, stores.
#pragma once

#include "kernels/cuda/linear_state.cuh"
#include "kernels/cuda/warp.cuh"

namespace h2o_prefill::linear {

// Word i of lane j of every four lanes becomes word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
  const bool upper = lane & 2;
  const bool odd = lane & 1;
  uint32_t own[2], other[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = upper ? words[2 + i] : words[i];
    other[i] = __shfl_xor_sync(0xFFFFFFFFU, upper ? words[i] : words[2 + i], 2);
  }
  const uint32_t own_next = __shfl_xor_sync(0xFFFFFFFFU, odd ? own[0] : own[1], 1);
  const uint32_t other_next = __shfl_xor_sync(0xFFFFFFFFU, odd ? other[0] : other[1], 1);
  const uint32_t own_kept = odd ? own[1] : own[0];
  const uint32_t other_kept = odd ? other[1] : other[0];
  const uint32_t of_own[2] = {odd ? own_next : own_kept, odd ? own_kept : own_next};
  const uint32_t of_other[2] = {odd ? other_next : other_kept, odd ? other_kept : other_next};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = upper ? of_other[i] : of_own[i];
    words[2 + i] = upper ? of_own[i] : of_other[i];
  }
}

// The weights of a warp's 16 rows, with decays and mask, and the factors of these rows.
template <DType dtype, int kDim>
__device__ __forceinline__ void make_weights(const LinearAttentionParams& p, Shared<kDim>& shared,
                                             const uint16_t* key, bool decays, int warp, int lane) {
  constexpr int kUnits = Shape<kDim>::kUnits;
  float s[1][kKeyTiles][4] = {};
  float of_start[2] = {};  // q . z, a lane's share
  {
    const tile::LaneRow<kUnits> query_lanes(layout::load_a_row(lane), layout::load_a_unit(lane));
    const tile::LaneRow<kUnits> key_lanes(layout::load_b_row(lane), layout::load_b_unit(lane));
    const uint16_t* const query = shared.query + warp * 16 * kDim;
#pragma unroll
    for (int k = 0; k < kUnits / 2; ++k) {
      uint32_t a[1][4];
      tile::load_a(a, query, query_lanes, k);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        if (n / 2 > warp) break;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, key + key_lanes.element(2 * k, n));
        tile::multiply_pair<dtype>(s, n, a, b);
      }
      if (!p.normalize) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 z = *reinterpret_cast<const float2*>(
            &shared.normalizer[16 * k + layout::a_column(lane, 2 * i)]);
        of_start[i % 2] += ptx::to_float<dtype>(static_cast<uint16_t>(a[0][i])) * z.x;
        of_start[i % 2] += ptx::to_float<dtype>(static_cast<uint16_t>(a[0][i] >> 16)) * z.y;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * warp + layout::accumulator_row(lane, 2 * h);
    float sum = 0.0F;
    float largest = 0.0F;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * n + layout::accumulator_column(lane, i);
        float& x = s[0][n][2 * h + i];
        if (decays) x *= shared.decays.between(column, row);
        if (column > row) x = 0.0F;
        sum += x;
        largest = fmaxf(largest, fabsf(x));
      }
    }
    const float scale = scale_to_fit<dtype>(warp::max<warp::kQuad>(largest));
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      if (n / 2 > warp) break;
      *reinterpret_cast<uint32_t*>(shared.weights + tile::element_of<kKeyTiles>(row, n) +
                                   layout::accumulator_column(lane, 0)) =
          ptx::pack_pair<dtype>(s[0][n][2 * h] * scale, s[0][n][2 * h + 1] * scale);
    }
    const float start = decays ? shared.decays.from_start[row] : 1.0F;
    const float weight = warp::sum<warp::kQuad>(sum + start * of_start[h]);
    if (lane % 4 == 0) {
      shared.row_scale[row] = start * scale;
      shared.row_factor[row] = output_factor(p, weight) * inverse_power(scale);
    }
  }
}

// phi(Q) S of a warp's value columns; state elements are multiplied by `scale` and rounded.
template <DType dtype, int kDim>
__device__ __forceinline__ void multiply_state(float (&out)[kRowTiles][Shape<kDim>::kN][4],
                                               const uint16_t* query, const State<kDim>& state,
                                               float scale, int lane) {
  using S = Shape<kDim>;
  const tile::LaneRow<S::kUnits> lanes(layout::load_a_row(lane), layout::load_a_unit(lane));
#pragma unroll
  for (int k = 0; k < S::kUnits / 2; ++k) {
    uint32_t a[kRowTiles][4];
    tile::load_a(a, query, lanes, k);
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
      uint32_t b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &state.at[m][2 * k + i % 2][2 * (i / 2)];
        b[i] = kScaled<dtype> ? ptx::pack_pair<dtype>(pair[0] * scale, pair[1] * scale)
                              : ptx::pack_pair<dtype>(pair[0], pair[1]);
      }
      tile::multiply_pair<dtype>(out, 2 * m, a, b);
    }
  }
}

// Rows of phi(Q) S become those of what weights V is added to.
template <int kDim>
__device__ __forceinline__ void scale_rows(float (&out)[kRowTiles][Shape<kDim>::kN][4],
                                           const Shared<kDim>& shared, float scale, int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float of_row = scale * shared.row_scale[16 * m + layout::accumulator_row(lane, 2 * h)];
#pragma unroll
      for (int n = 0; n < Shape<kDim>::kN; ++n) {
        out[m][n][2 * h] *= of_row;
        out[m][n][2 * h + 1] *= of_row;
      }
    }
  }
}

// out += weights V of a warp's value columns.
template <DType dtype, int kDim>
__device__ __forceinline__ void add_weighted(float (&out)[kRowTiles][Shape<kDim>::kN][4],
                                             const uint16_t* weights, const uint16_t* value,
                                             int warp, int lane) {
  using S = Shape<kDim>;
  const tile::LaneRow<kKeyTiles> weight_lanes(layout::load_a_row(lane), layout::load_a_unit(lane));
  const tile::LaneRow<S::kUnits> value_lanes(layout::load_b_transposed_row(lane),
                                             layout::load_b_transposed_unit(lane));
#pragma unroll
  for (int k = 0; k < kRowTiles; ++k) {
    uint32_t b[S::kM][4];
#pragma unroll
    for (int n = 0; n < S::kM; ++n) {
      ptx::ldmatrix_x4_transposed(b[n], value + value_lanes.element(warp * S::kN + 2 * n, 2 * k));
    }
#pragma unroll
    for (int m = k; m < kRowTiles; ++m) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, weights + weight_lanes.element(2 * k, 2 * m));
#pragma unroll
      for (int n = 0; n < S::kM; ++n) {
        ptx::mma_m16n8k16<dtype>(out[m][2 * n], a, b[n][0], b[n][1]);
        ptx::mma_m16n8k16<dtype>(out[m][2 * n + 1], a, b[n][2], b[n][3]);
      }
    }
  }
}

// Stores the first `count` rows of a warp's value columns, times their factors, in whole units.
template <DType dtype, int kDim>
__device__ __forceinline__ void store_rows(uint16_t* rows, int64_t stride, int count, int units,
                                           const float (&out)[kRowTiles][Shape<kDim>::kN][4],
                                           const Shared<kDim>& shared, int warp, int lane) {
  constexpr int kN = Shape<kDim>::kN;
  constexpr int kHalves = 4 / kN;  // of the 16 rows of a tile, that a lane's four words are of
  const int word = lane % 4;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int first = 0; first < 2; first += kHalves) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = first + i / kN;
        const float factor = shared.row_factor[16 * m + layout::accumulator_row(lane, 2 * h)];
        words[i] = ptx::pack_pair<dtype>(out[m][i % kN][2 * h] * factor,
                                         out[m][i % kN][2 * h + 1] * factor);
      }
      transpose_quad(words, lane);
      const int row = 16 * m + layout::accumulator_row(lane, 2 * (first + word / kN));
      const int unit = warp * kN + word % kN;
      if (row < count && unit < units) {
        *reinterpret_cast<tile::Unit*>(rows + row * stride + unit * tile::kUnitElements) = {
            {words[0], words[1], words[2], words[3]}};
      }
    }
  }
}

}  // namespace h2o_prefill::linear
