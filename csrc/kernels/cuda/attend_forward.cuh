// Forward attention of 16-bit dtypes on tensor cores, for sm_80 and up.
//
// A block of 4 warps owns a tile of query rows, of heads that share their keys, each warp whole
// rows of it: logits, probabilities and outputs stay in its registers. Tiles of keys and of values
// come by turns (keys of tile 0, values of tile 0, keys of tile 1, ...) through a ring of three
// buffers: while one is multiplied the next two are on their way, and one barrier a buffer is
// enough.
#pragma once

#include "kernels/cuda/forward_rows.cuh"

namespace h2o_prefill::attend {

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
  using Limited = LimitedKeys<kWarpRows, kKeys>;
  using Gathered = ListedKeys<kRows, kKeys>;

  // The query tile, which becomes the tile of outputs; the ring; a RowTile; what ListedKeys keeps.
  static constexpr int shared_bytes(bool gathered) {
    return 2 * kTileElements + static_cast<int>(sizeof(RowTile)) +
           (gathered ? Gathered::kSharedBytes : 0);
  }
};

// Changes the sign of a warp's query rows: the maximum is one of products times a positive scale.
template <int kElements>
__device__ __forceinline__ void negate(uint16_t* rows, int lane) {
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(rows);
  for (int i = lane; i < kElements / 2; i += 32) pairs[i] ^= 0x80008000U;
  __syncwarp();
}

template <DType dtype, int kDim, KeyKind kKind>
__global__ void __launch_bounds__(tile::kThreads, ForwardShape<kDim>::kBlocksPerSm)
    attend_forward_kernel(const __grid_constant__ ForwardGrid grid) {
  using Shape = ForwardShape<kDim>;
  constexpr int kUnits = Shape::kUnits;
  constexpr int kM = Shape::kM;
  constexpr int kWarpRows = Shape::kWarpRows;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kStage = Shape::kStage;
  constexpr bool kGathered = kKind == KeyKind::kGathered;
  using Keys = KeysOf<Shape, kKind>;
  const AttendForwardParams& p = grid.params;

  uint16_t* const query_tile = ptx::dynamic_shared<uint16_t>();
  uint16_t* const ring = query_tile + Shape::kRows * kDim;
  // Kept for the end, where it is read again.
  RowTile& shared_rows = *reinterpret_cast<RowTile*>(query_tile + Shape::kTileElements);
  ptx::wait_for_earlier_launches();
  const RowTile rows = row_tile<Shape::kRows, kKind>(grid, blockIdx.x);
  if (rows.count <= 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) shared_rows = rows;
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

  const TileUnits query(p.query, rows);
  tile::load<Shape::kRows, kUnits>(query_tile, query.rows_of(p.query), [&](int r) {
    return query.row_of(grid.place<kKind>(rows, r), rows.count);
  });
  if constexpr (kGathered) {
    __syncthreads();
    keys.store(0, keys.prepare(0, thread));
    keys.store(1, keys.prepare(1, thread));
    __syncthreads();
  }
  if (keys.tiles > 0) load_keys(0, 0);
  ptx::cp_async_commit();
  if (keys.tiles > 0) load_values(0, kStage);
  ptx::cp_async_commit();

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
      if (j == keys.memory_tiles) store_memory_lse(grid, shared_rows, softmax, warp_row);
    }
    const int lane = tile::recomputed(thread % 32);
    float s[kM][Shape::kKeyTiles][4];

    wait_for_stage();
    if (j + 1 < keys.tiles) load_keys(j + 1, loaded);
    ptx::cp_async_commit();
    if (j == 0 && grid.negate) negate<kWarpRows * kDim>(warp_tile, lane);
    const bool masked = keys.fully_masked(j, warp_row);
    if (!masked) {
      tile::multiply_transposed<dtype, kUnits>(s, warp_tile, ring + stage, lane);
      if (p.cap_scale != 0.0F) tile::cap(s, p.cap_scale);
      if (!keys.unmasked(j, warp_row)) {
        if constexpr (kGathered) {
          mask_gathered(s, *keys.shared, keys.slot_of(j), grid, shared_rows, warp_row, lane);
        } else {
          mask(s, keys, j, warp_row, lane);
        }
      }
      const auto rescaling = softmax.update(s, p.scale_log2);
      if (rescaling.is_needed()) rescaling.apply(out);
    }
    next_stage();

    wait_for_stage();
    if (j + 1 < keys.tiles) load_values(j + 1, loaded);
    ptx::cp_async_commit();
    const typename Keys::Lookup lookup = keys.prepare(j + 2, thread);
    if (!masked) tile::multiply_rounded<dtype, kUnits>(out, s, ring + stage, lane);
    if (j + 2 < keys.tiles) keys.store(j + 2, lookup);
    next_stage();
  }
  ptx::cp_async_wait<0>();
  if constexpr (kGathered) {
    if (keys.tiles == keys.memory_tiles) store_memory_lse(grid, shared_rows, softmax, warp_row);
  }
  __syncthreads();
  // The output takes the place of the query rows, which are the warp's own. The number of the first
  // one is found anew: the loop has no register for what follows from it.
  const int out_row = tile::recomputed(thread) / 32 * kWarpRows;
  if (p.merge_with_out) {
    load_result<kKind, kUnits, kWarpRows>(grid, shared_rows, warp_tile, out_row);
  }
  store_result<dtype, kKind, kDim>(grid, shared_rows, out, softmax, warp_tile, out_row);
}

}  // namespace h2o_prefill::attend
