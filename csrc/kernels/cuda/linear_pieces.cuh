// What the kernels of linear attention share: a sequence in pieces, decays of a chunk, features.
//
// Three launches: the first sums up what each piece of a sequence but the last one brings to the
// state (with what came before the sequence in the first piece), the second makes of these sums the
// states before each piece, and the third walks all pieces at once, chunk after chunk, from the
// states before them. A sequence of one piece takes the third launch alone.
#pragma once

#include "kernels/cuda/linear_attention.h"
#include "kernels/cuda/tile.cuh"
#include "kernels/softmax_state.h"

namespace h2o_prefill::linear {

// Decays below this (of base 2) leave nothing, and sums of them must stay numbers.
constexpr float kLeastLogDecay = -1e6F;

// A (batch row, KV head) is a unit. Query heads of a unit are shared out to `parts` blocks.
struct Grid {
  LinearAttentionParams params;
  int64_t units;
  int64_t piece_rows;  // whole chunks
  int64_t state_floats;
  int64_t slot_floats;  // a state and D floats of the normaliser, in the order of the kernel
  int pieces;
  int parts;

  H2O_HOST_DEVICE int64_t group() const { return params.query.heads / params.key.heads; }
  H2O_HOST_DEVICE int64_t sums() const { return units * (pieces - 1); }
  // The slot of one of the first pieces - 1 pieces: what it adds to the state, then the state after
  // it.
  H2O_HOST_DEVICE float* slot(int64_t unit, int64_t piece) const {
    return params.workspace + (unit * (pieces - 1) + piece) * slot_floats;
  }
  // Its log decay, of base 2.
  H2O_HOST_DEVICE float* slot_decay(int64_t unit, int64_t piece) const {
    return params.workspace + sums() * slot_floats + unit * (pieces - 1) + piece;
  }
};

// The rows of one block.
struct Piece {
  int64_t unit;
  int64_t batch;
  int64_t kv_head;
  int piece;
  int first_head;  // query heads
  int end_head;
  int64_t first;  // rows
  int64_t rows;
  bool is_last;
  bool writes_last_state;
};

// Pieces [0, pieces) of all units, `parts` blocks each.
__device__ __forceinline__ Piece piece_of(const Grid& grid, uint32_t block, int pieces, int parts) {
  const LinearAttentionParams& p = grid.params;
  Piece x;
  const int part = static_cast<int>(block % parts);
  block /= parts;
  x.piece = static_cast<int>(block % pieces);
  x.unit = block / pieces;
  x.batch = x.unit / p.key.heads;
  x.kv_head = x.unit % p.key.heads;
  const int group = static_cast<int>(grid.group());
  const int first_head = static_cast<int>(x.kv_head) * group;
  x.first_head = first_head + part * group / parts;
  x.end_head = first_head + (part + 1) * group / parts;
  x.first = x.piece * grid.piece_rows;
  x.rows = min(grid.piece_rows, p.key.length - x.first);
  x.is_last = x.piece == grid.pieces - 1;
  x.writes_last_state = x.is_last && part == 0;
  return x;
}

// Decays inside a chunk. G_i = g_0 + ... + g_i, in base 2, is kept in two floats: the error of a
// decay between two tokens is then relative to that decay, however long the sum is.
template <int kRows>
struct ChunkDecays {
  float high[kRows];
  float low[kRows];
  float from_start[kRows];  // 2^G_i
  float to_end[kRows];      // 2^(G_last - G_i)

  __device__ __forceinline__ float between(int from, int to) const {
    return ptx::exp2(high[to] - high[from] + (low[to] - low[from]));
  }
  // Decay of the whole chunk.
  __device__ __forceinline__ float kept() const { return from_start[kRows - 1]; }
  __device__ __forceinline__ float total() const { return high[kRows - 1]; }
};

// The log decays of a piece; null: none.
struct DecayRows {
  const float* data;
  int64_t stride;
};

__device__ __forceinline__ DecayRows decay_rows(const LinearAttentionParams& p, const Piece& x) {
  if (!p.log_decay) return {nullptr, 0};
  return {p.log_decay + x.batch * p.decay_stride_batch + x.kv_head * p.decay_stride_head +
              x.first * p.decay_stride_row,
          p.decay_stride_row};
}

// Executed by one warp. Rows from `count` on decay nothing.
template <int kRows>
__device__ __forceinline__ void scan_decays(ChunkDecays<kRows>& decays, const DecayRows& rows,
                                            int64_t first, int count, int lane) {
  constexpr int kOfLane = kRows / 32;
  double sums[kOfLane];
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int row = lane * kOfLane + i;
    float g = row < count ? rows.data[(first + row) * rows.stride] : 0.0F;
    if (g < kLeastLogDecay) g = kLeastLogDecay;
    sum += static_cast<double>(g) * 1.4426950408889634;
    sums[i] = sum;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double before = __shfl_up_sync(0xFFFFFFFFU, sum, step);
    if (lane >= step) sum += before;
  }
  const double of_earlier = sum - sums[kOfLane - 1];
  const double last = __shfl_sync(0xFFFFFFFFU, sum, 31);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int row = lane * kOfLane + i;
    const double from_start = of_earlier + sums[i];
    const float high = static_cast<float>(from_start);
    decays.high[row] = high;
    decays.low[row] = static_cast<float>(from_start - high);
    decays.from_start[row] = ptx::exp2(high);
    decays.to_end[row] = ptx::exp2(static_cast<float>(last - from_start));
  }
}

// Features; those of NaN are NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.0F ? 0.0F : x; }

__device__ __forceinline__ float elu_plus_one(float x) {
  // Computed for all x, since a branch would diverge.
  const int exponential = tile::recomputed(__float_as_int(ptx::exp2(x * kLog2E)));
  return x > 0.0F ? x + 1.0F : __int_as_float(exponential);
}

__device__ __forceinline__ float feature_of(FeatureMap feature_map, float x) {
  if (feature_map == FeatureMap::kRelu) return relu(x);
  return feature_map == FeatureMap::kEluPlusOne ? elu_plus_one(x) : x;
}

// What outputs are multiplied by, from phi(q) . z.
__device__ __forceinline__ float output_factor(const LinearAttentionParams& p, float weight) {
  if (!p.normalize) return p.scale;
  return weight == 0.0F ? 0.0F : 1.0F / weight;
}

constexpr int kJoinThreads = 256;

// Each slot becomes the state after its piece. A thread has one element of all pieces of a unit,
// and those of kAhead pieces are on their way to it at once.
template <int kAhead>
__global__ void __launch_bounds__(kJoinThreads, 4)
    join_pieces_kernel(const __grid_constant__ Grid grid) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kJoinThreads + threadIdx.x;
  if (i >= (grid.params.normalize ? grid.slot_floats : grid.state_floats)) return;
  const int slots = grid.pieces - 1;
  for (int64_t unit = blockIdx.y; unit < grid.units; unit += gridDim.y) {
    float* const element = grid.slot(unit, 0) + i;
    const float* const decays = grid.slot_decay(unit, 0);
    float state = element[0];
    for (int first = 1; first < slots; first += kAhead) {
      float sums[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (first + j < slots) sums[j] = element[(first + j) * grid.slot_floats];
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (first + j >= slots) break;
        state = ptx::exp2(decays[first + j]) * state + sums[j];
        element[(first + j) * grid.slot_floats] = state;
      }
    }
  }
}

}  // namespace h2o_prefill::linear
