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

// Where a row of a tile stands: its row of the call and its query head, counted from the tile's
// first. The rows of a position in all heads of a group follow each other, then the rows of the
// next position, so that a tile spans few positions: its heads share the lists of their blocks.
struct PlaceInTile {
  int row;
  int head;

  // Rows are divided by their heads as multiplied by an inverse, rounded up: exact while the row
  // times the heads, which bound the error, is less than 2^kShift.
  static constexpr int kShift = 20;
  static constexpr int kMostHeads = 512;
  static_assert((kMostHeads + 128) * kMostHeads < 1 << kShift);
  static int inverse_of(int64_t heads) { return static_cast<int>((1 << kShift) / heads + 1); }
};

// The launch computes this once for all blocks. Row tiles are numbered so that heads, which share
// keys in L2, are neighbours, and the tiles of a chunk with the most keys go first.
struct ForwardGrid {
  AttendForwardParams params;  // scale_log2 > 0
  uint32_t heads;              // batch rows times query heads, or groups of these in one tile
  uint32_t chunks;             // with rows of the call
  uint32_t tiles;              // row tiles of a chunk
  int group;                   // query heads of a KV head
  int tile_heads;              // of a tile: 1 or all of a group
  int inverse;                 // PlaceInTile's of tile_heads
  bool negate;                 // the scale is -params.scale_log2

  __host__ __device__ uint32_t row_tiles() const { return heads * chunks * tiles; }

  // Row i of a tile, by kind of keys: tiles have rows of several heads where keys are gathered.
  template <KeyKind kKind>
  __device__ __forceinline__ PlaceInTile place(const RowTile& rows, int i) const {
    if constexpr (kKind != KeyKind::kGathered) return {i, 0};
    const int number = rows.lead + i;
    const int row = number * inverse >> PlaceInTile::kShift;
    return {row, number - row * tile_heads};
  }
};

// The grid of tiles with `tile_rows` rows, of one head each or of all heads of a group; empty if
// there are more tiles than blocks in a launch.
inline ForwardGrid grid_of(const AttendForwardParams& params, int64_t tile_rows,
                           bool of_groups = false) {
  const int64_t rows = params.rows.count;
  const int64_t chunk_size = params.gathered ? 0 : params.causal.chunk_size;
  const int64_t chunk_rows = chunk_size && chunk_size < rows ? chunk_size : rows;
  const int64_t group = params.query.heads / params.key.heads;
  const bool fits = group <= PlaceInTile::kMostHeads && group * rows <= INT32_MAX;
  const int64_t tile_heads = of_groups && fits ? group : 1;
  const int64_t heads = params.query.batch * params.query.heads / tile_heads;
  const int64_t chunks = divide_up(rows, chunk_rows);
  const int64_t tiles = divide_up(chunk_rows * tile_heads, tile_rows);
  if (heads * chunks * tiles > INT32_MAX) return {};
  return {params,
          static_cast<uint32_t>(heads),
          static_cast<uint32_t>(chunks),
          static_cast<uint32_t>(tiles),
          static_cast<int>(group),
          static_cast<int>(tile_heads),
          PlaceInTile::inverse_of(tile_heads),
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

// Row tile `number` of the launch; count <= 0 where it has no rows. Positions are int32, as they
// are in lists of them.
template <int kRows, KeyKind kKind>
__device__ __forceinline__ RowTile row_tile(const ForwardGrid& grid, uint32_t number) {
  constexpr bool kChunked = kKind == KeyKind::kCausal;
  const AttendForwardParams& p = grid.params;
  const uint32_t unit = number % grid.heads;
  const uint32_t index = number / grid.heads;
  const int chunk = static_cast<int>(index % grid.chunks);
  const int tile = static_cast<int>(grid.tiles - 1 - index / grid.chunks);
  const int tile_heads = kKind == KeyKind::kGathered ? grid.tile_heads : 1;
  const int heads = static_cast<int>(p.query.heads) / tile_heads;
  const int chunk_size = kChunked ? static_cast<int>(p.causal.chunk_size) : 0;
  const int chunk_first = static_cast<int>(p.rows.begin) + chunk * chunk_size;
  const int call_end = static_cast<int>(p.rows.begin + p.rows.count);
  const int end = chunk_size ? min(chunk_first + chunk_size, call_end) : call_end;
  RowTile rows{};
  rows.batch = static_cast<int>(unit) / heads;
  rows.head = static_cast<int>(unit) % heads * tile_heads;
  rows.kv_head = rows.head / grid.group;
  rows.lead = tile * kRows % tile_heads;
  rows.first = chunk_first + tile * kRows / tile_heads;
  rows.count = min(end - rows.first, grid.place<kKind>(rows, kRows - 1).row + 1);
  rows.position = static_cast<int>(p.rows.past) + rows.first;
  rows.key_begin = kChunked ? static_cast<int>(p.causal.begin) + chunk * chunk_size : 0;
  if (kChunked) {
    rows.key_begin = max(rows.key_begin, rows.position + 1 - static_cast<int>(p.causal.window));
  }
  return rows;
}

__device__ __forceinline__ int64_t state_row(const HeadsView& query, const RowTile& rows) {
  return (rows.batch * query.heads + rows.head) * query.length + rows.first;
}

// Of a row of the tile, from there.
__device__ __forceinline__ int64_t state_row(const HeadsView& query, const PlaceInTile& place) {
  return place.head * query.length + place.row;
}

// A tile's rows in a tensor of 16-bit elements, as rows of one unit each, so that 32 bits tell
// where a row begins: heads of a group lie less than 2^35 bytes apart.
struct TileUnits {
  uint16_t* data;
  int row_stride;
  int head_stride;

  __device__ __forceinline__ TileUnits(const HeadsView& view, const RowTile& rows)
      : data(tile::row_pointer<uint16_t>(view, rows.batch, rows.head, rows.first)),
        row_stride(static_cast<int>(view.stride_row / tile::kUnitElements)),
        head_stride(static_cast<int>(view.stride_head / tile::kUnitElements)) {}

  __device__ __forceinline__ int unit_of(const PlaceInTile& place) const {
    return place.row * row_stride + place.head * head_stride;
  }
  // What copies of a tile take: rows of `view`, and the one for a row of the tile; negative: none.
  __device__ __forceinline__ tile::HeadRows rows_of(const HeadsView& view) const {
    return {data, tile::kUnitElements, static_cast<int>(view.dim) / tile::kUnitElements};
  }
  __device__ __forceinline__ int row_of(const PlaceInTile& place, int count) const {
    return place.row < count ? unit_of(place) : -1;
  }
  __device__ __forceinline__ uint16_t* at(const PlaceInTile& place, int unit) const {
    return data + static_cast<int64_t>(unit_of(place) + unit) * tile::kUnitElements;
  }
};

// Masks gathered keys of which `shared` has codes.
template <int kM, int kKeyTiles, typename Shared>
__device__ __forceinline__ void mask_gathered(float (&s)[kM][kKeyTiles][4], const Shared& shared,
                                              int slot, const ForwardGrid& grid,
                                              const RowTile& rows, int warp_row, int lane) {
  uint32_t test[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + 16 * m + layout::accumulator_row(lane, 2 * h);
      test[m][h] = Shared::test_of(grid.place<KeyKind::kGathered>(rows, row).row);
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    const uint32_t codes = shared.codes(slot, 8 * n + layout::accumulator_column(lane, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (!Shared::sees(codes + test[m][i / 2], i % 2)) s[m][n][i] = kNegInf;
      }
    }
  }
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
__device__ __forceinline__ void store_memory_lse(const ForwardGrid& grid, const RowTile& rows,
                                                 const OnlineSoftmax<kM>& softmax, int warp_row) {
  const AttendForwardParams& p = grid.params;
  if (!p.memory_lse) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const lse = p.memory_lse + state_row(p.query, rows);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const PlaceInTile place = grid.place<KeyKind::kGathered>(
          rows, warp_row + 16 * m + layout::accumulator_row(lane, 2 * h));
      float weight = 1.0F;
      float of_row = natural_lse(softmax.maximum[m][h], softmax.total(m, h));
      add_sink(p, rows.head + place.head, weight, of_row);
      if (lane % 4 == 0 && place.row < rows.count) {
        lse[state_row(p.query, place)] = of_row;
      }
    }
  }
}

// Calls copy(unit of a warp's tile, unit of the output) for all units of the warp's rows.
template <KeyKind kKind, int kUnits, int kWarpRows, typename Copy>
__device__ __forceinline__ void for_each_unit(const ForwardGrid& grid, const RowTile& rows,
                                              uint16_t* warp_tile, int warp_row, const Copy& copy) {
  const int lane = tile::recomputed(static_cast<int>(threadIdx.x) % 32);
  const TileUnits result(grid.params.out, rows);
  const int units = static_cast<int>(grid.params.value.dim) / tile::kUnitElements;
#pragma unroll 4
  for (int i = lane; i < kWarpRows * kUnits; i += 32) {
    const int unit = i % kUnits;
    const PlaceInTile place = grid.place<kKind>(rows, warp_row + i / kUnits);
    if (place.row < rows.count && unit < units) {
      copy(warp_tile + tile::element_of<kUnits>(i / kUnits, unit), result.at(place, unit));
    }
  }
}

// Begins to copy a warp's rows of the output to its tile, for store_result().
template <KeyKind kKind, int kUnits, int kWarpRows>
__device__ __forceinline__ void load_result(const ForwardGrid& grid, const RowTile& rows,
                                            uint16_t* warp_tile, int warp_row) {
  for_each_unit<kKind, kUnits, kWarpRows>(
      grid, rows, warp_tile, warp_row,
      [](uint16_t* in_tile, const uint16_t* result) { ptx::cp_async_16(in_tile, result, true); });
  ptx::cp_async_commit();
}

// Divides by the denominators, merges with the result that load_result() has loaded, and stores a
// warp's rows in whole units, by way of its tile.
template <DType dtype, KeyKind kKind, int kDim, int kM>
__device__ __forceinline__ void store_result(const ForwardGrid& grid, const RowTile& rows,
                                             const float (&out)[kM][kDim / 8][4],
                                             const OnlineSoftmax<kM>& softmax, uint16_t* warp_tile,
                                             int warp_row) {
  constexpr int kUnits = kDim / tile::kUnitElements;
  const AttendForwardParams& p = grid.params;
  const int lane = tile::recomputed(static_cast<int>(threadIdx.x) % 32);
  float* const lse = p.lse ? p.lse + state_row(p.query, rows) : nullptr;
  if (p.merge_with_out) {
    ptx::cp_async_wait<0>();
    __syncwarp();
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * m + layout::accumulator_row(lane, 2 * h);
      const PlaceInTile place = grid.place<kKind>(rows, warp_row + row);
      const bool exists = place.row < rows.count;
      const float denominator = softmax.total(m, h);
      float of_new = inverse_denominator(denominator);
      float of_old = 0.0F;
      float row_lse = natural_lse(softmax.maximum[m][h], denominator);
      if (p.merge_with_out) {
        const float before = exists ? lse[state_row(p.query, place)] : kNegInf;
        const MergeWeights weight = merge_weights(row_lse, before);
        row_lse = weight.lse;
        of_new *= weight.a;
        of_old = weight.b;
        __syncwarp();  // all lanes of the row have read it
      } else {
        add_sink(p, rows.head + place.head, of_new, row_lse);
      }
      if (lse && exists && lane % 4 == 0) lse[state_row(p.query, place)] = row_lse;
#pragma unroll
      for (int n = 0; n < kUnits; ++n) {
        uint32_t* const pair = reinterpret_cast<uint32_t*>(
            warp_tile + tile::element_of<kUnits>(row, n) + layout::accumulator_column(lane, 0));
        float low = out[m][n][2 * h] * of_new;
        float high = out[m][n][2 * h + 1] * of_new;
        if (of_old != 0.0F && exists) {
          low += of_old * ptx::to_float<dtype>(static_cast<uint16_t>(*pair));
          high += of_old * ptx::to_float<dtype>(static_cast<uint16_t>(*pair >> 16));
        }
        *pair = ptx::pack_pair<dtype>(low, high);
      }
    }
  }
  __syncwarp();
  for_each_unit<kKind, kUnits, 16 * kM>(
      grid, rows, warp_tile, warp_row, [](const uint16_t* in_tile, uint16_t* result) {
        *reinterpret_cast<tile::Unit*>(result) = *reinterpret_cast<const tile::Unit*>(in_tile);
      });
}

}  // namespace h2o_prefill::attend
