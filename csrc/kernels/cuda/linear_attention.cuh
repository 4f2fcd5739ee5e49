// Linear attention of 16-bit dtypes on tensor cores, for sm_80 and up: the first and the third
// launch of linear_pieces.cuh.
//
// A block of 4 warps walks a piece in chunks of 64 tokens. Its state lies in the registers of the
// warps as S^T, each warp with a quarter of the value columns: an accumulator of V^T K, rounded in
// pairs, is the b fragment of phi(Q) S as it is, so that the state never goes through shared
// memory. For each chunk and query head of the block
//
//   a warp multiplies 16 rows of phi(Q) phi(K)^T with decays and mask, and leaves them as weights
//   in shared memory, for all warps; then it has, for its columns, phi(Q) S of all rows and adds
//   weights V to it;
//
// and behind the last head, S^T = decay S^T + (decayed V)^T phi(K). Keys have two buffers, values
// and queries one: values of the next chunk arrive under Q K^T and Q S, queries under the rest.
//
// What bounds it, for D = Dv = 128, C = 64 and a H200 (989 Tflop/s, 4.8 TB/s, so 206 flops a byte).
// Counted, not measured.
//
//   flops  A token of a query head takes 4 C D in the chunk, of which 2.5 C D are run (the tiles
//          above the diagonal are left out), and 2 D Dv with the state; a token of a KV head 2 D Dv
//          in either launch. With G query heads to a KV head 53 k + 66 k / G a query head.
//   bytes  2 (D + Dv) for a query and an output; keys and values, read twice, and 16 D Dv / R of
//          states, for pieces of R tokens, once for a KV head: 512 + (1024 + 256) / G at R = 1024.
//   ratio  G = 4: 70 kflop and 832 bytes, 84 flops a byte, 41 % of the tensor peak at most.
//          G = 1: 119 kflop and 1792 bytes, 66 flops a byte, 32 %. Memory bounds it.
//
// The multiprocessor is not far behind. In SASS for sm_90a with elu+1 a warp issues about 1800
// instructions for a query head of a chunk, 208 of them mma, and 1050 with 128 mma for the keys and
// the state in either launch: at one a clock, 47 % of the tensor peak. Shared memory moves 210 kB
// and 144 kB for these: at 128 bytes a clock, 48 %. mma.sync itself reaches about 60 % on Hopper.
#pragma once

#include "kernels/cuda/linear_pieces.cuh"
#include "kernels/cuda/warp.cuh"

namespace h2o_prefill::linear {

constexpr int kChunk = 64;
constexpr int kKeyTiles = kChunk / 8;
constexpr int kRowTiles = kChunk / 16;

// Sizes for rows of kDim elements, to which D and Dv are padded.
template <int kDim>
struct Shape {
  static constexpr int kUnits = kDim / tile::kUnitElements;
  static constexpr int kTile = kChunk * kDim;
  // Tiles of 16 and of 8 value columns of a warp.
  static constexpr int kM = kDim / 16 / tile::kWarps;
  static constexpr int kN = 2 * kM;
  // The rows of a chunk are shared out where keys are added up, a pair of columns a thread.
  static constexpr int kSumParts = tile::kThreads / (kDim / 2);
  static constexpr int kSumRows = kChunk / kSumParts;
  static constexpr int kStateFloats = kDim * kDim;
  static constexpr int kBlocksPerSm = kDim <= 64 ? 4 : 2;  // as far as registers go
};

template <int kDim>
struct alignas(128) Shared {
  uint16_t key[2][Shape<kDim>::kTile];
  uint16_t value[Shape<kDim>::kTile];
  uint16_t query[Shape<kDim>::kTile];
  uint16_t weights[kChunk * kChunk];  // by row and key
  ChunkDecays<kChunk> decays;
  float state_scale[tile::kWarps];  // what state elements of a warp are multiplied by
  float row_scale[kChunk];          // what weights of a row were multiplied by ...
  float row_factor[kChunk];         // ... and its outputs are multiplied by
  float normalizer[kDim];
  float key_sums[Shape<kDim>::kSumParts][kDim];
  float kept;   // of the normaliser before the chunk of these sums
  Piece piece;  // read again where it is needed: registers are accumulators
};

// Two blocks fit into a multiprocessor of sm_80, which has 164 kB and takes 1 kB of them a block.
static_assert(Shape<128>::kBlocksPerSm * (sizeof(Shared<128>) + 1024) <= 164 * 1024);

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

// Whether products and states are scaled where they are rounded, by powers of two: bfloat16 has the
// range of float32.
template <DType dtype>
constexpr bool kScaled = dtype == DType::kFloat16;

// A power that leaves elements up to `largest` in the range.
template <DType dtype>
__device__ __forceinline__ float scale_to_fit(float largest) {
  if constexpr (!kScaled<dtype>) return 1.0F;
  constexpr int kBits = 12;  // of the range, 15
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 0xFFU) - 127;
  const int scale = kBits - max(min(exponent, 120), -kBits);
  return __uint_as_float(static_cast<uint32_t>(scale + 127) << 23);
}

// 1 / x of such a power.
__device__ __forceinline__ float inverse_power(float x) {
  return __uint_as_float((254U << 23) - __float_as_uint(x));
}

// map() of the first `count` rows of a tile, `units` units each, in place and by all threads.
template <DType dtype, int kUnits, typename Map>
__device__ __forceinline__ void map_rows(uint16_t* rows, int count, int units, const Map& map) {
  constexpr int kPassRows = tile::kThreads / kUnits;
  const int thread = tile::recomputed(static_cast<int>(threadIdx.x));
  const int unit = thread % kUnits;
  if (unit >= units) return;
#pragma unroll 2
  for (int row = thread / kUnits; row < count; row += kPassRows) {
    auto& packed = *reinterpret_cast<tile::Unit*>(rows + tile::element_of<kUnits>(row, unit));
    tile::Unit mapped = packed;
#pragma unroll
    for (uint32_t& word : mapped.words) {
      word = ptx::pack_pair<dtype>(map(ptx::to_float<dtype>(static_cast<uint16_t>(word))),
                                   map(ptx::to_float<dtype>(static_cast<uint16_t>(word >> 16))));
    }
    packed = mapped;
  }
}

template <DType dtype, int kUnits>
__device__ __forceinline__ void map_features(uint16_t* rows, FeatureMap feature_map, int count,
                                             int units) {
  if (feature_map == FeatureMap::kEluPlusOne) {
    map_rows<dtype, kUnits>(rows, count, units, [](float x) { return elu_plus_one(x); });
  } else if (feature_map == FeatureMap::kRelu) {
    map_rows<dtype, kUnits>(rows, count, units, [](float x) { return relu(x); });
  }
}

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
    const float scale = scale_to_fit<dtype>(warp::quad_max(largest));
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      if (n / 2 > warp) break;
      *reinterpret_cast<uint32_t*>(shared.weights + tile::element_of<kKeyTiles>(row, n) +
                                   layout::accumulator_column(lane, 0)) =
          ptx::pack_pair<dtype>(s[0][n][2 * h] * scale, s[0][n][2 * h + 1] * scale);
    }
    const float start = decays ? shared.decays.from_start[row] : 1.0F;
    const float weight = warp::quad_sum(sum + start * of_start[h]);
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

// Rows [first, first + count) as a tile, zeros behind them.
template <int kDim>
__device__ __forceinline__ void load_chunk(uint16_t* to, const tile::HeadRows& rows, int64_t first,
                                           int count) {
  tile::load<kChunk, Shape<kDim>::kUnits>(
      to, rows, [&](int r) { return r < count ? first + r : int64_t{-1}; });
}

__device__ __forceinline__ int rows_of_chunk(const Piece& x, int chunk) {
  return static_cast<int>(min(x.rows - static_cast<int64_t>(chunk) * kChunk, int64_t{kChunk}));
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

// First launch: a block leaves what its piece brings in the piece's slot.
template <DType dtype, int kDim>
__global__ void __launch_bounds__(tile::kThreads, Shape<kDim>::kBlocksPerSm)
    linear_sums_kernel(const __grid_constant__ Grid grid) {
  using S = Shape<kDim>;
  const LinearAttentionParams& p = grid.params;
  auto& shared = *ptx::dynamic_shared<Shared<kDim>>();
  const Piece x = piece_of(grid, blockIdx.x, grid.pieces - 1, 1);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const tile::HeadRows keys = tile::head_rows(p.key, x.batch, x.kv_head, x.first);
  const tile::HeadRows values = tile::head_rows(p.value, x.batch, x.kv_head, x.first);
  const DecayRows decays = decay_rows(p, x);
  const int chunks = static_cast<int>(tile::divide_up<int64_t>(x.rows, kChunk));
  // Values have the buffer of the queries too.
  const auto value_of = [&](int chunk) { return chunk % 2 ? shared.query : shared.value; };
  const auto load = [&](int chunk) {
    if (chunk < chunks) {
      const int64_t first = static_cast<int64_t>(chunk) * kChunk;
      load_chunk<kDim>(shared.key[chunk % 2], keys, first, rows_of_chunk(x, chunk));
      load_chunk<kDim>(value_of(chunk), values, first, rows_of_chunk(x, chunk));
    }
    ptx::cp_async_commit();
  };

  load(0);
  State<kDim> state;
  if (x.piece == 0) {
    read_start(state, shared, p, x, warp, lane);
  } else {
    state.for_each(warp, lane, [](float& element, int, int) { element = 0.0F; });
    if (threadIdx.x < kDim) shared.normalizer[threadIdx.x] = 0.0F;
  }
  float total = 0.0F;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int count = rows_of_chunk(x, chunk);
    uint16_t* const key = shared.key[chunk % 2];
    __syncthreads();  // nobody reads the previous chunk
    if (p.normalize && chunk > 0) add_key_sums(shared);
    load(chunk + 1);
    ptx::cp_async_wait<1>();
    __syncthreads();
    map_features<dtype, S::kUnits>(key, p.feature_map, count, keys.units);
    if (decays.data && warp == 0) {
      scan_decays(shared.decays, decays, static_cast<int64_t>(chunk) * kChunk, count, lane);
    }
    __syncthreads();
    if (decays.data) total += shared.decays.total();
    if (p.normalize) sum_keys<dtype>(shared, key, decays.data != nullptr, count);
    update_state<dtype>(state, shared, key, value_of(chunk), decays.data != nullptr, warp, lane);
  }
  ptx::cp_async_wait<0>();
  float* const slot = grid.slot(x.unit, x.piece);
  state.for_each_of_slot(slot, warp, lane, [](const float (&own)[4], float4& there) {
    there = make_float4(own[0], own[1], own[2], own[3]);
  });
  if (threadIdx.x == 0) *grid.slot_decay(x.unit, x.piece) = total;
  if (!p.normalize) return;
  __syncthreads();
  add_key_sums(shared);
  if (threadIdx.x < kDim) slot[S::kStateFloats + threadIdx.x] = shared.normalizer[threadIdx.x];
}

// Third launch: a block attends with its query heads over one piece.
template <DType dtype, int kDim>
__global__ void __launch_bounds__(tile::kThreads, Shape<kDim>::kBlocksPerSm)
    linear_attend_kernel(const __grid_constant__ Grid grid) {
  using S = Shape<kDim>;
  const LinearAttentionParams& p = grid.params;
  auto& shared = *ptx::dynamic_shared<Shared<kDim>>();
  const Piece& x = shared.piece;
  if (threadIdx.x == 0) shared.piece = piece_of(grid, blockIdx.x, grid.pieces, grid.parts);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_decays = p.log_decay != nullptr;
  const int chunks = static_cast<int>(tile::divide_up<int64_t>(x.rows, kChunk));
  const auto load = [&](uint16_t* to, const HeadsView& view, int head, int chunk) {
    if (chunk < chunks) {
      load_chunk<kDim>(to, tile::head_rows(view, x.batch, head, x.first),
                       static_cast<int64_t>(chunk) * kChunk, rows_of_chunk(x, chunk));
    }
    ptx::cp_async_commit();
  };
  const auto load_keys = [&](int chunk) {
    load(shared.key[chunk % 2], p.key, static_cast<int>(x.kv_head), chunk);
  };

  load_keys(0);
  load(shared.query, p.query, x.first_head, 0);
  State<kDim> state;
  if (x.piece == 0) {
    read_start(state, shared, p, x, thread / 32, thread % 32);
  } else {
    float* const slot = grid.slot(x.unit, x.piece - 1);
    state.for_each_of_slot(slot, thread / 32, thread % 32,
                           [](float (&own)[4], const float4& there) {
                             own[0] = there.x;
                             own[1] = there.y;
                             own[2] = there.z;
                             own[3] = there.w;
                           });
    if (thread < kDim) {
      shared.normalizer[thread] = p.normalize ? slot[S::kStateFloats + thread] : 0.0F;
    }
  }
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int count = rows_of_chunk(x, chunk);
    const int warp = thread / 32;
    uint16_t* const key = shared.key[chunk % 2];
    __syncthreads();  // nobody reads the previous chunk
    if (p.normalize && chunk > 0) add_key_sums(shared);
    load(shared.value, p.value, static_cast<int>(x.kv_head), chunk);
    load_keys(chunk + 1);
    if constexpr (kScaled<dtype>) {
      const float scale = scale_to_fit<dtype>(warp::max(state.largest()));
      if (thread % 32 == 0) shared.state_scale[warp] = scale;
    }
#pragma unroll 1
    for (int head = x.first_head; head < x.end_head; ++head) {
      const bool is_first = head == x.first_head;
      const int lane = tile::recomputed(thread % 32);
      // Keys and queries are there; values and the next keys may not be.
      if (is_first) {
        ptx::cp_async_wait<2>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncthreads();
      map_features<dtype, S::kUnits>(shared.query, p.feature_map, count,
                                     static_cast<int>(p.key.dim) / tile::kUnitElements);
      if (is_first) {
        map_features<dtype, S::kUnits>(key, p.feature_map, count,
                                       static_cast<int>(p.key.dim) / tile::kUnitElements);
        if (has_decays && warp == 0) {
          scan_decays(shared.decays, decay_rows(p, x), static_cast<int64_t>(chunk) * kChunk, count,
                      lane);
        }
      }
      __syncthreads();
      make_weights<dtype>(p, shared, key, has_decays, warp, lane);
      float out[kRowTiles][S::kN][4] = {};
      multiply_state<dtype>(out, shared.query, state,
                            kScaled<dtype> ? shared.state_scale[warp] : 1.0F,
                            tile::recomputed(thread % 32));
      ptx::cp_async_wait<1>();
      __syncthreads();  // weights and values are there, and nobody reads the queries
      const bool is_last = head + 1 == x.end_head;
      load(shared.query, p.query, is_last ? x.first_head : head + 1, chunk + is_last);
      const int again = tile::recomputed(thread % 32);
      if (has_decays || kScaled<dtype>) {
        scale_rows(out, shared, kScaled<dtype> ? inverse_power(shared.state_scale[warp]) : 1.0F,
                   again);
      }
      add_weighted<dtype, kDim>(out, shared.weights, shared.value, warp, again);
      store_rows<dtype>(tile::row_pointer<uint16_t>(p.out, x.batch, head,
                                                    x.first + static_cast<int64_t>(chunk) * kChunk),
                        p.out.stride_row, count,
                        static_cast<int>(p.value.dim) / tile::kUnitElements, out, shared, warp,
                        tile::recomputed(thread % 32));
    }
    if (chunk + 1 == chunks && !x.writes_last_state) break;
    if (p.normalize) sum_keys<dtype>(shared, key, has_decays, count);
    update_state<dtype>(state, shared, key, shared.value, has_decays, warp,
                        tile::recomputed(thread % 32));
  }
  ptx::cp_async_wait<0>();
  if (!x.writes_last_state) return;
  const int dim = static_cast<int>(p.key.dim);
  const int value_dim = static_cast<int>(p.value.dim);
  state.for_each(thread / 32, thread % 32, [&](float& element, int d, int v) {
    if (d < dim && v < value_dim) p.last_state[(x.unit * dim + d) * value_dim + v] = element;
  });
  if (!p.normalize) return;
  __syncthreads();
  add_key_sums(shared);
  const int column = static_cast<int>(threadIdx.x);
  if (column < dim) p.last_normalizer[x.unit * dim + column] = shared.normalizer[column];
}

}  // namespace h2o_prefill::linear
