// Shared by the forward kernels of all instruction sets: their row tiles, masks, softmax, and how
// results are stored.
//
// The softmax is the online softmax in base 2. The accumulators are rescaled only when a row's
// maximum has grown; otherwise the factor is 1.
#pragma once

#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/attend_keys.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/softmax_state.h"

namespace h2o_prefill::attend {

// The launch computes this once for all blocks. Row tiles are numbered so that heads, which share
// keys in L2, are neighbours, and the tiles of a chunk with the most keys go first.
struct ForwardGrid {
  AttendForwardParams params;  // scale_log2 > 0
  uint32_t heads;              // batch rows times query heads, or groups of these in one tile
  uint32_t chunks;             // with rows of the call
  uint32_t tiles;              // row tiles of a chunk
  int group;                   // query heads of a KV head
  bool negate;                 // the scale is -params.scale_log2

  __host__ __device__ uint32_t row_tiles() const { return heads * chunks * tiles; }
};

// The grid of tiles with `tile_rows` rows of each of `tile_heads` heads; empty if there are more
// tiles than blocks in a launch.
inline ForwardGrid grid_of(const AttendForwardParams& params, int64_t tile_rows,
                           int64_t tile_heads = 1) {
  const int64_t rows = params.rows.count;
  const int64_t chunk_size = params.gathered ? 0 : params.causal.chunk_size;
  const int64_t chunk_rows = chunk_size && chunk_size < rows ? chunk_size : rows;
  const int64_t heads = params.query.batch * params.query.heads / tile_heads;
  const int64_t chunks = divide_up(rows, chunk_rows);
  const int64_t tiles = divide_up(chunk_rows, tile_rows);
  if (heads * chunks * tiles > INT32_MAX) return {};
  return {params,
          static_cast<uint32_t>(heads),
          static_cast<uint32_t>(chunks),
          static_cast<uint32_t>(tiles),
          static_cast<int>(params.query.heads / params.key.heads),
          false};
}

// Counts the head's sink in a row's end: the weight of its products, and its lse.
__device__ __forceinline__ void add_sink(const AttendForwardParams& p, int head, float& weight,
                                         float& lse) {
  if (!p.sinks) return;
  const MergeWeights with_sink = merge_weights(lse, p.sinks[head]);
  weight *= with_sink.a;
  lse = with_sink.lse;
}

// Whether tiles of tile_rows rows take rows of two heads, so that they span fewer recall blocks.
inline bool shares_lists(const AttendForwardParams& params, int64_t tile_rows) {
  return params.recall.offsets && params.recall.block < tile_rows &&
         params.query.heads / params.key.heads % 2 == 0;
}

// The softmax of a warp's rows so far. Of the rows a lane has two in each of kM products, and
// shares them with 3 other lanes; sum is of this lane's keys alone until total().
template <int kM>
struct OnlineSoftmax {
  float maximum[kM][2];  // scaled, in base 2
  float sum[kM][2];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      maximum[m][0] = maximum[m][1] = kNegInf;
      sum[m][0] = sum[m][1] = 0.0F;
    }
  }

  // The effect of one tile of keys: earlier sums and outputs are multiplied by `factor`.
  struct Rescaling {
    float factor[kM][2];
    bool grown;  // some factor of the lane is not 1

    // By all lanes of the warp.
    __device__ __forceinline__ bool is_needed() const { return __any_sync(0xFFFFFFFFU, grown); }

    template <int kN>
    __device__ __forceinline__ void apply(float (&out)[kM][kN][4]) const {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[m][e / 2];
        }
      }
    }
  };

  // Replaces products by exp2(scale * product - maximum), and rescales the sums to the new maximum.
  // A row that has seen no key is exp2(-inf - 0) throughout.
  template <int kKeyTiles>
  __device__ __forceinline__ Rescaling update(float (&s)[kM][kKeyTiles][4], float scale) {
    Rescaling rescaling;
    rescaling.grown = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
          top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, 2));
        const float before = maximum[m][h];
        const float after = fmaxf(before, top * scale);
        const float offset = after == kNegInf ? 0.0F : after;
        maximum[m][h] = after;
        rescaling.grown |= after > before;
        rescaling.factor[m][h] = ptx::exp2(before - offset);
        sum[m][h] *= rescaling.factor[m][h];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            s[m][n][e] = ptx::exp2(s[m][n][e] * scale - offset);
            sum[m][h] += s[m][n][e];
          }
        }
      }
    }
    return rescaling;
  }

  // The denominator of a row; the same in all its lanes.
  __device__ __forceinline__ float total(int m, int h) const {
    float all = sum[m][h] + __shfl_xor_sync(0xFFFFFFFFU, sum[m][h], 1);
    return all + __shfl_xor_sync(0xFFFFFFFFU, all, 2);
  }
};

// Row tile `number` of the launch, of its first head; count <= 0 where it has no rows. Positions
// are int32, as they are in lists of them.
template <int kRows, bool kGathered, int kHeads = 1>
__device__ __forceinline__ RowTile row_tile(const ForwardGrid& grid, uint32_t number) {
  const AttendForwardParams& p = grid.params;
  const uint32_t unit = number % grid.heads;
  const uint32_t index = number / grid.heads;
  const int chunk = static_cast<int>(index % grid.chunks);
  const int tile = static_cast<int>(grid.tiles - 1 - index / grid.chunks);
  const int heads = static_cast<int>(p.query.heads) / kHeads;
  const int chunk_size = kGathered ? 0 : static_cast<int>(p.causal.chunk_size);
  const int chunk_first = static_cast<int>(p.rows.begin) + chunk * chunk_size;
  const int call_end = static_cast<int>(p.rows.begin + p.rows.count);
  const int end = chunk_size ? min(chunk_first + chunk_size, call_end) : call_end;
  RowTile rows{};
  rows.batch = static_cast<int>(unit) / heads;
  rows.head = static_cast<int>(unit) % heads * kHeads;
  rows.kv_head = rows.head / grid.group;
  rows.first = chunk_first + tile * kRows;
  rows.count = min(end - rows.first, kRows);
  rows.position = static_cast<int>(p.rows.past) + rows.first;
  rows.key_begin = kGathered ? 0 : static_cast<int>(p.causal.begin) + chunk * chunk_size;
  if (!kGathered) {
    rows.key_begin = max(rows.key_begin, rows.position + 1 - static_cast<int>(p.causal.window));
  }
  return rows;
}

// Copies the units of a warp's rows between a tile and a tensor of `units` a row.
template <int kUnits, int kWarpRows, typename Copy>
__device__ __forceinline__ void for_each_unit(int lane, int rows, int units, const Copy& copy) {
#pragma unroll 4
  for (int i = lane; i < kWarpRows * kUnits; i += 32) {
    const int row = i / kUnits;
    const int unit = i % kUnits;
    if (row < rows && unit < units) copy(row, unit);
  }
}

__device__ __forceinline__ int64_t state_row(const HeadsView& query, const RowTile& rows) {
  return (rows.batch * query.heads + rows.head) * query.length + rows.first;
}

template <int kM, int kKeyTiles, typename Keys>
__device__ __forceinline__ void mask(float (&s)[kM][kKeyTiles][4], const Keys& keys, int j,
                                     int warp_row, int lane) {
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * n + layout::accumulator_column(lane, i);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int row = warp_row + 16 * m + layout::accumulator_row(lane, i);
        if (!keys.is_visible(j, key, row)) s[m][n][i] = kNegInf;
      }
    }
  }
}

// Stores the lse of a warp's rows over the memory sets alone, if the caller asks for it.
template <int kM>
__device__ __forceinline__ void store_memory_lse(const AttendForwardParams& p, const RowTile& rows,
                                                 const OnlineSoftmax<kM>& softmax, int warp_row) {
  if (!p.memory_lse) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const lse = p.memory_lse + state_row(p.query, rows) + warp_row;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * m + layout::accumulator_row(lane, 2 * h);
      float weight = 1.0F;
      float of_row = natural_lse(softmax.maximum[m][h], softmax.total(m, h));
      add_sink(p, rows.head, weight, of_row);
      if (lane % 4 == 0 && warp_row + row < rows.count) lse[row] = of_row;
    }
  }
}

// First element of a warp's rows of the output.
__device__ __forceinline__ uint16_t* result_rows(const AttendForwardParams& p, const RowTile& rows,
                                                 int warp_row) {
  return tile::row_pointer<uint16_t>(p.out, rows.batch, rows.head, rows.first + warp_row);
}

// Begins to copy a warp's rows of the output to its tile, for store_result().
template <int kUnits, int kWarpRows>
__device__ __forceinline__ void load_result(const AttendForwardParams& p, const RowTile& tile_rows,
                                            uint16_t* warp_tile, int warp_row) {
  const int lane = tile::recomputed(static_cast<int>(threadIdx.x) % 32);
  const uint16_t* const result = result_rows(p, tile_rows, warp_row);
  for_each_unit<kUnits, kWarpRows>(
      lane, tile_rows.count - warp_row, static_cast<int>(p.value.dim) / tile::kUnitElements,
      [&](int row, int unit) {
        ptx::cp_async_16(warp_tile + tile::element_of<kUnits>(row, unit),
                         result + row * p.out.stride_row + unit * tile::kUnitElements, true);
      });
  ptx::cp_async_commit();
}

// Divides by the denominators, merges with the result that load_result() has loaded, and stores a
// warp's rows in whole units, by way of its tile.
template <DType dtype, int kDim, int kM>
__device__ __forceinline__ void store_result(const AttendForwardParams& p, const RowTile& tile_rows,
                                             const float (&out)[kM][kDim / 8][4],
                                             const OnlineSoftmax<kM>& softmax, uint16_t* warp_tile,
                                             int warp_row) {
  constexpr int kUnits = kDim / tile::kUnitElements;
  constexpr int kWarpRows = 16 * kM;
  const int lane = tile::recomputed(static_cast<int>(threadIdx.x) % 32);
  const int rows = tile_rows.count - warp_row;
  const int units = static_cast<int>(p.value.dim) / tile::kUnitElements;
  float* const lse = p.lse ? p.lse + state_row(p.query, tile_rows) + warp_row : nullptr;
  uint16_t* const result = result_rows(p, tile_rows, warp_row);
  if (p.merge_with_out) {
    ptx::cp_async_wait<0>();
    __syncwarp();
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * m + layout::accumulator_row(lane, 2 * h);
      const float denominator = softmax.total(m, h);
      float of_new = inverse_denominator(denominator);
      float of_old = 0.0F;
      float row_lse = natural_lse(softmax.maximum[m][h], denominator);
      if (p.merge_with_out) {
        const float before = row < rows ? lse[row] : kNegInf;
        const MergeWeights weight = merge_weights(row_lse, before);
        row_lse = weight.lse;
        of_new *= weight.a;
        of_old = weight.b;
        __syncwarp();  // all lanes of the row have read it
      } else {
        add_sink(p, tile_rows.head, of_new, row_lse);
      }
      if (lse && row < rows && lane % 4 == 0) lse[row] = row_lse;
#pragma unroll
      for (int n = 0; n < kUnits; ++n) {
        uint32_t* const pair = reinterpret_cast<uint32_t*>(
            warp_tile + tile::element_of<kUnits>(row, n) + layout::accumulator_column(lane, 0));
        float low = out[m][n][2 * h] * of_new;
        float high = out[m][n][2 * h + 1] * of_new;
        if (of_old != 0.0F && row < rows) {
          low += of_old * ptx::to_float<dtype>(static_cast<uint16_t>(*pair));
          high += of_old * ptx::to_float<dtype>(static_cast<uint16_t>(*pair >> 16));
        }
        *pair = ptx::pack_pair<dtype>(low, high);
      }
    }
  }
  __syncwarp();
  for_each_unit<kUnits, kWarpRows>(lane, rows, units, [&](int row, int unit) {
    *reinterpret_cast<tile::Unit*>(result + row * p.out.stride_row + unit * tile::kUnitElements) =
        *reinterpret_cast<const tile::Unit*>(warp_tile + tile::element_of<kUnits>(row, unit));
  });
}

}  // namespace h2o_prefill::attend
