// Forward attention of 16-bit dtypes on tensor cores, for sm_80 and up.
//
// A block of 4 warps owns a tile of query rows of one head, each warp whole rows of it: logits,
// probabilities and outputs stay in its registers. Tiles of keys and of values come by turns (keys
// of tile 0, values of tile 0, keys of tile 1, ...) through a ring of three buffers: while one is
// multiplied the next two are on their way, and one barrier a buffer is enough.
//
// Softmax is the online one in base 2. The accumulators are rescaled only when a row's maximum has
// grown, which the factor 1 would not change.
#pragma once

#include <type_traits>

#include "kernels/cuda/attend_forward.h"
#include "kernels/cuda/attend_keys.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/softmax_state.h"

namespace h2o_prefill::attend {

// What the launch computes once for all blocks. Row tiles are numbered so that heads, which share
// keys in L2, are neighbours, and those of a chunk with the most keys go first.
struct ForwardGrid {
  AttendForwardParams params;  // scale_log2 > 0
  uint32_t heads;              // batch rows times query heads
  uint32_t chunks;             // with rows of the call
  uint32_t tiles;              // row tiles of a chunk
  int group;                   // query heads of a KV head
  bool negate;                 // the scale is -params.scale_log2

  __host__ __device__ uint32_t row_tiles() const { return heads * chunks * tiles; }
};

// That of row tiles with `tile_rows` rows; none if there are more than a launch has blocks.
inline ForwardGrid grid_of(const AttendForwardParams& params, int64_t tile_rows) {
  const int64_t chunk_rows =
      !params.gathered && params.chunk_size && params.chunk_size < params.rows ? params.chunk_size
                                                                               : params.rows;
  const int64_t heads = params.query.batch * params.query.heads;
  const int64_t chunks = tile::divide_up(params.rows, chunk_rows);
  const int64_t tiles = tile::divide_up(chunk_rows, tile_rows);
  if (heads * chunks * tiles > INT32_MAX) return {};
  return {params,
          static_cast<uint32_t>(heads),
          static_cast<uint32_t>(chunks),
          static_cast<uint32_t>(tiles),
          static_cast<int>(params.query.heads / params.key.heads),
          false};
}

// Sizes for rows of kDim elements, to which D and Dv are padded. 32 rows a warp let each fragment
// of keys serve two products; rows of more than 128 leave registers for 16.
template <int kDim>
struct ForwardShape {
  static constexpr int kUnits = kDim / tile::kUnitElements;
  static constexpr int kM = kDim <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kM;
  static constexpr int kRows = tile::kWarps * kWarpRows;
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kStage = kKeys * kDim;  // elements of a buffer of the ring
  static constexpr int kStages = 3;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kTileElements = kRows * kDim + kStages * kStage;
  using Causal = CausalKeys<kWarpRows, kKeys>;
  using Gathered = GatheredKeys<kRows, kKeys>;

  // The query tile, which becomes the tile of outputs; the ring; what GatheredKeys keeps; RowTile.
  static constexpr int shared_bytes(bool gathered) {
    return 2 * kTileElements + static_cast<int>(sizeof(RowTile)) +
           (gathered ? Gathered::kSharedBytes : 0);
  }
};

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

  // What one tile of keys changed: sums and outputs so far count `factor` times as much.
  struct Rescaling {
    float factor[kM][2];
    bool grown;  // some factor of the lane is not 1

    template <int kN>
    __device__ __forceinline__ void apply(float (&out)[kM][kN][4]) const {
      if (!__any_sync(0xFFFFFFFFU, grown)) return;
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

__device__ __forceinline__ float natural_lse_of(float maximum, float denominator) {
  return denominator == 0.0F ? kNegInf : (maximum + ptx::log2(denominator)) * kLn2;
}

// Row tile `number` of the launch; count <= 0 where it has no rows. Positions are int32, as they
// are in lists of them.
template <int kRows, bool kGathered>
__device__ __forceinline__ RowTile row_tile(const ForwardGrid& grid, uint32_t number) {
  const AttendForwardParams& p = grid.params;
  const uint32_t unit = number % grid.heads;
  const uint32_t index = number / grid.heads;
  const int chunk = static_cast<int>(index % grid.chunks);
  const int tile = static_cast<int>(grid.tiles - 1 - index / grid.chunks);
  const int heads = static_cast<int>(p.query.heads);
  const int chunk_size = kGathered ? 0 : static_cast<int>(p.chunk_size);
  const int chunk_first = static_cast<int>(p.row_begin) + chunk * chunk_size;
  const int call_end = static_cast<int>(p.row_begin + p.rows);
  const int end = chunk_size ? min(chunk_first + chunk_size, call_end) : call_end;
  RowTile rows{};
  rows.batch = static_cast<int>(unit) / heads;
  rows.head = static_cast<int>(unit) % heads;
  rows.kv_head = rows.head / grid.group;
  rows.first = chunk_first + tile * kRows;
  rows.count = min(end - rows.first, kRows);
  rows.position = static_cast<int>(p.past) + rows.first;
  rows.key_begin = chunk_size ? static_cast<int>(p.past) + chunk_first : 0;
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

struct alignas(layout::kUnitBytes) Unit {
  uint32_t words[4];
};

__device__ __forceinline__ int64_t state_row(const HeadsView& query, const RowTile& rows) {
  return (rows.batch * query.heads + rows.head) * query.length + rows.first;
}

// Changes the sign of a warp's query rows: the maximum is one of products times a positive scale.
template <int kElements>
__device__ __forceinline__ void negate(uint16_t* rows, int lane) {
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(rows);
  for (int i = lane; i < kElements / 2; i += 32) pairs[i] ^= 0x80008000U;
  __syncwarp();
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
        if (!keys.seen(j, key, row)) s[m][n][i] = kNegInf;
      }
    }
  }
}

// The denominators so far of a warp's rows, where they are wanted.
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
      const float x = natural_lse_of(softmax.maximum[m][h], softmax.total(m, h));
      if (lane % 4 == 0 && warp_row + row < rows.count) lse[row] = x;
    }
  }
}

// First element of a warp's rows of the output.
__device__ __forceinline__ uint16_t* result_rows(const AttendForwardParams& p, const RowTile& rows,
                                                 int warp_row) {
  return tile::row_pointer<uint16_t>(p.out, rows.batch, rows.head, rows.first + warp_row);
}

// Begins to copy what the output holds of a warp's rows to its tile, for store_result().
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

// Divides by the denominators, merges with what load_result() has brought, and stores a warp's
// rows. They leave from its tile in whole units.
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
      float row_lse = natural_lse_of(softmax.maximum[m][h], denominator);
      if (p.merge_with_out) {
        const float before = row < rows ? lse[row] : kNegInf;
        const MergeWeights weight = merge_weights(row_lse, before);
        row_lse = weight.lse;
        of_new *= weight.a;
        of_old = weight.b;
        __syncwarp();  // all lanes of the row have read it
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
    *reinterpret_cast<Unit*>(result + row * p.out.stride_row + unit * tile::kUnitElements) =
        *reinterpret_cast<const Unit*>(warp_tile + tile::element_of<kUnits>(row, unit));
  });
}

template <DType dtype, int kDim, bool kGathered>
__global__ void __launch_bounds__(tile::kThreads, ForwardShape<kDim>::kBlocksPerSm)
    attend_forward_kernel(const __grid_constant__ ForwardGrid grid) {
  using Shape = ForwardShape<kDim>;
  constexpr int kUnits = Shape::kUnits;
  constexpr int kM = Shape::kM;
  constexpr int kWarpRows = Shape::kWarpRows;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kStage = Shape::kStage;
  using Keys = std::conditional_t<kGathered, typename Shape::Gathered, typename Shape::Causal>;
  const AttendForwardParams& p = grid.params;

  uint16_t* const query_tile = ptx::dynamic_shared<uint16_t>();
  uint16_t* const ring = query_tile + Shape::kRows * kDim;
  // Kept for the end, where it is read again.
  RowTile& shared_rows = *reinterpret_cast<RowTile*>(query_tile + Shape::kTileElements);
  const RowTile rows = row_tile<Shape::kRows, kGathered>(grid, blockIdx.x);
  if (rows.count <= 0) return;
  if (threadIdx.x == 0) shared_rows = rows;
  const Keys keys(p, rows, &shared_rows + 1);
  const tile::HeadRows key_rows = tile::head_rows(p.key, rows.batch, rows.kv_head, rows.key_begin);
  const tile::HeadRows value_rows =
      tile::head_rows(p.value, rows.batch, rows.kv_head, rows.key_begin);
  const auto load_keys = [&](int j, int stage) {
    tile::load<kKeys, kUnits>(ring + stage, key_rows, [&](int r) { return keys.row_of(j, r); });
  };
  const auto load_values = [&](int j, int stage) {
    tile::load<kKeys, kUnits>(ring + stage, value_rows, [&](int r) { return keys.row_of(j, r); });
  };

  tile::load<Shape::kRows, kUnits>(query_tile,
                                   tile::head_rows(p.query, rows.batch, rows.head, rows.first),
                                   [&](int r) { return r < rows.count ? r : -1; });
  if constexpr (kGathered) {
    __syncthreads();
    keys.store(0, keys.prepare(0));
    keys.store(1, keys.prepare(1));
    __syncthreads();
  }
  if (keys.tiles > 0) load_keys(0, 0);
  ptx::cp_async_commit();
  if (keys.tiles > 0) load_values(0, kStage);
  ptx::cp_async_commit();

  const int thread = static_cast<int>(threadIdx.x);
  const int warp_row = thread / 32 * kWarpRows;
  uint16_t* const warp_tile = query_tile + warp_row * kDim;
  float out[kM][kUnits][4] = {};
  OnlineSoftmax<kM> softmax;

  int stage = 0;            // of the buffer that is multiplied next ...
  int loaded = 2 * kStage;  // ... and of the one that is free
  const auto next_stage = [&] {
    loaded = stage;
    stage = stage == 2 * kStage ? 0 : stage + kStage;
  };
  // Waits for the buffer at `stage`; afterwards nobody reads the one at `loaded`.
  const auto wait_for_stage = [&] {
    ptx::cp_async_wait<1>();
    __syncthreads();
  };
#pragma unroll 1
  for (int j = 0; j < keys.tiles; ++j) {
    if constexpr (kGathered) {
      if (j == keys.memory_tiles) store_memory_lse(p, shared_rows, softmax, warp_row);
    }
    const int lane = tile::recomputed(thread % 32);
    float s[kM][Shape::kKeyTiles][4];

    wait_for_stage();
    if (j + 1 < keys.tiles) load_keys(j + 1, loaded);
    ptx::cp_async_commit();
    if (j == 0 && grid.negate) negate<kWarpRows * kDim>(warp_tile, lane);
    const bool unseen = keys.unseen(j, warp_row);
    if (!unseen) {
      tile::multiply_transposed<dtype, kUnits>(s, warp_tile, ring + stage, lane);
      if (!keys.all_seen(j, warp_row)) mask(s, keys, j, warp_row, lane);
      softmax.update(s, p.scale_log2).apply(out);
    }
    next_stage();

    wait_for_stage();
    if (j + 1 < keys.tiles) load_values(j + 1, loaded);
    ptx::cp_async_commit();
    const typename Keys::Entry entry = keys.prepare(j + 2);
    if (!unseen) tile::multiply_rounded<dtype, kUnits>(out, s, ring + stage, lane);
    if (j + 2 < keys.tiles) keys.store(j + 2, entry);
    next_stage();
  }
  ptx::cp_async_wait<0>();
  if constexpr (kGathered) {
    if (keys.tiles == keys.memory_tiles) store_memory_lse(p, shared_rows, softmax, warp_row);
  }
  __syncthreads();
  // The output takes the place of the query rows, which are the warp's own.
  if (p.merge_with_out) load_result<kUnits, kWarpRows>(p, shared_rows, warp_tile, warp_row);
  store_result<dtype, kDim>(p, shared_rows, out, softmax, warp_tile, warp_row);
}

}  // namespace h2o_prefill::attend
