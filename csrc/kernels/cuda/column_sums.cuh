// Column sums of 16-bit dtypes on tensor cores, for sm_80 and up.
//
// With the denominators known, a column sum needs no softmax: a block of 4 warps owns a tile of
// keys, each warp whole keys with all their fragments in registers, computes S^T = K Q^T against
// one query tile after another, and adds exp(s - lse) up in registers. Nothing is added in memory
// but by one thread in a fixed order. Query tiles come through a ring of three buffers: while one
// is multiplied the next two are on their way.
#pragma once

#include <type_traits>

#include "kernels/cuda/column_sums_reduce.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/softmax_state.h"

namespace h2o_prefill::column_sums {

// One block's work. Rows and keys of a causal chunk are counted from where it begins.
struct Part {
  int batch;
  int kv_head;
  int first_head;  // query heads [first_head, end_head)
  int end_head;
  int64_t list;     // of its sums among the parts
  int chunk_first;  // row of the call
  int chunk_rows;
  int first_key;
  int first_row;
  int end_row;
};

// Sizes for rows of kDim elements, to which D is padded. The fragments of a warp's keys take 64
// registers or fewer.
template <int kDim>
struct Shape {
  static constexpr int kUnits = kDim / tile::kUnitElements;
  static constexpr int kM = kDim <= 128 ? 2 : 1;
  static constexpr int kWarpKeys = 16 * kM;
  static constexpr int kKeys = tile::kWarps * kWarpKeys;
  static constexpr int kRows = 64;
  // Memory sets are few keys, which do not make more blocks.
  static constexpr int blocks_per_sm(bool gathered) { return gathered || kDim > 128 ? 2 : 3; }
  static constexpr int kStage = kRows * kDim;  // elements of a buffer of the ring
  static constexpr int kStages = 3;
  static_assert(kKeys <= 2 * kRows);

  // Follows the ring, whose last two buffers hold the keys at first. The part and the sums over
  // heads are used too rarely to occupy registers.
  struct Shared {
    float offsets[kStages][kRows];  // of the rows of a buffer
    float totals[kKeys];
    Part part;
  };
  static constexpr int kSharedBytes = 2 * kStages * kStage + sizeof(Shared);
};

// Where a part lies in the grid.
struct PartIndex {
  int unit;
  int head_part;
  int row_part;
  int chunk;
  int tile;
};

template <int kKeys, bool kGathered>
__device__ __forceinline__ Part part_of(const Grid& grid, const PartIndex& index) {
  const ColumnSumsParams& p = grid.params;
  Part part{};
  part.list =
      (static_cast<int64_t>(index.unit) * grid.head_parts + index.head_part) * grid.row_parts +
      index.row_part;
  part.first_key = index.tile * kKeys;
  const int kv_heads = static_cast<int>(p.key.heads);
  part.batch = index.unit / kv_heads;
  part.kv_head = index.unit % kv_heads;
  const int heads = static_cast<int>(grid.group / grid.head_parts);
  part.first_head = part.kv_head * static_cast<int>(grid.group) + index.head_part * heads;
  part.end_head = part.first_head + heads;
  const int chunk_size = kGathered ? 0 : static_cast<int>(p.causal.chunk_size);
  part.chunk_first = static_cast<int>(p.rows.begin) + index.chunk * chunk_size;
  const int left = static_cast<int>(p.rows.begin + p.rows.count) - part.chunk_first;
  part.chunk_rows = kGathered ? left : min(left, chunk_size);
  part.first_row = kGathered ? index.row_part * grid.split_rows : part.first_key;
  part.end_row =
      kGathered ? min(part.first_row + grid.split_rows, part.chunk_rows) : part.chunk_rows;
  return part;
}

template <int kKeys, bool kGathered>
__device__ __forceinline__ Part part_of_block(const Grid& grid) {
  uint32_t left = blockIdx.x;
  const auto next = [&](uint32_t count) {
    const int i = static_cast<int>(left % count);
    left /= count;
    return i;
  };
  PartIndex index{};
  index.unit = next(grid.units);
  index.head_part = next(grid.head_parts);
  index.row_part = next(grid.row_parts);
  index.chunk = next(grid.chunks);
  index.tile = static_cast<int>(left);
  return part_of<kKeys, kGathered>(grid, index);
}

// The natural lse of a row as exp2() takes it; a row that counts nothing is exp2(-inf).
__device__ __forceinline__ float offset_of(float lse) {
  return lse == kNegInf ? -kNegInf : lse * kLog2E;
}

// A query tile of some head of the part.
template <int kRows>
struct QueryTile {
  int head;
  int row;

  __device__ __forceinline__ void advance(const Part& part) {
    row += kRows;
    if (row >= part.end_row) {
      row = part.first_row;
      ++head;
    }
  }
};

// Stores the sum of a column over the queries of a part. Members of memory sets always have parts.
template <bool kGathered>
__device__ __forceinline__ void store_total(const Grid& grid, const Part& part, int column,
                                            float total) {
  const ColumnSumsParams& p = grid.params;
  if (kGathered || grid.has_parts()) {
    const int64_t columns = kGathered ? p.memory.width : p.rows.count;
    p.partial[part.list * columns + column] = total;
  } else {
    store_sum<false>(p, part.batch * p.key.heads + part.kv_head, column, total);
  }
}

// sum += the weights of one query tile for a warp's keys. If masked, key k of the warp counts for
// rows from k on, where row 0 of the tile is row `first_row`.
template <DType dtype, int kUnits, int kRows, bool kCapped, int kM>
__device__ __forceinline__ void add_tile(float (&sum)[kM][2],
                                         const uint32_t (&keys)[kUnits / 2][kM][4],
                                         const uint16_t* query, const float* offsets,
                                         const ColumnSumsParams& p, bool masked, int first_row,
                                         int lane) {
  const tile::LaneRow<kUnits> lanes(layout::load_b_row(lane), layout::load_b_unit(lane));
// Unrolled, the tanhf of all rows would be in registers at a time.
#pragma unroll(kCapped ? 1 : kRows / 16)
  for (int n = 0; n < kRows / 8; n += 2) {
    float s[kM][2][4] = {};
#pragma unroll
    for (int k = 0; k < kUnits / 2; ++k) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, query + lanes.element(2 * k, n));
      tile::multiply_pair<dtype>(s, 0, keys[k], b);
    }
    if constexpr (kCapped) tile::cap(s, p.cap_scale);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int row = 8 * (n + q) + layout::accumulator_column(lane, 0);
      const float row_offsets[2] = {offsets[row], offsets[row + 1]};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float weight = ptx::exp2(s[m][q][i] * p.scale_log2 - row_offsets[i % 2]);
          const int key = 16 * m + layout::accumulator_row(lane, i);
          if (masked && first_row + row + i % 2 < key) weight = 0.0F;
          sum[m][i / 2] += weight;
        }
      }
    }
  }
}

template <DType dtype, int kDim, bool kGathered>
__global__ void __launch_bounds__(tile::kThreads, Shape<kDim>::blocks_per_sm(kGathered))
    column_sums_kernel(const __grid_constant__ Grid grid) {
  using S = Shape<kDim>;
  constexpr int kUnits = S::kUnits;
  constexpr int kM = S::kM;
  constexpr int kRows = S::kRows;
  const ColumnSumsParams& p = grid.params;
  uint16_t* const ring = ptx::dynamic_shared<uint16_t>();
  auto& shared = *reinterpret_cast<typename S::Shared*>(ring + S::kStages * S::kStage);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_key = thread / 32 * S::kWarpKeys;
  ptx::wait_for_earlier_launches();

  const auto load_query = [&](const Part& part, const QueryTile<kRows>& query, int stage) {
    tile::load<kRows, kUnits>(
        ring + stage * S::kStage,
        tile::head_rows(p.query, part.batch, query.head, part.chunk_first),
        [&](int r) { return query.row + r < part.end_row ? query.row + r : -1; });
  };
  const auto load_offset = [&](const Part& part, const QueryTile<kRows>& query) {
    const int row = query.row + thread;
    if (thread >= kRows || row >= part.end_row) return -kNegInf;
    const int64_t list = part.batch * p.query.heads + query.head;
    return offset_of(p.lse[list * p.query.length + part.chunk_first + row]);
  };
  const auto store_offset = [&](int stage, float offset) {
    if (thread < kRows) shared.offsets[stage][thread] = offset;
  };

  // The first query tile and the keys; the keys' buffers are free as soon as they are in registers.
  QueryTile<kRows> now, ahead;
  {
    const Part part = part_of_block<S::kKeys, kGathered>(grid);
    const int columns = kGathered ? static_cast<int>(p.memory.width) : part.chunk_rows;
    if (part.first_key >= columns) return;
    if (thread == 0) shared.part = part;
    if (thread < S::kKeys) shared.totals[thread] = 0.0F;
    const int32_t* const set =
        kGathered ? p.memory.of_unit(part.batch * p.key.heads + part.kv_head) : nullptr;
    now = {part.first_head, part.first_row};
    // Absent members of a memory set are its last ones: a tile without keys needs no query.
    if (part.first_row >= part.end_row || (kGathered && set[part.first_key] < 0)) {
      now.head = part.end_head;
    }
    ahead = now;
    if (now.head < part.end_head) {
      load_query(part, ahead, 0);
      store_offset(0, load_offset(part, ahead));
      tile::load<S::kKeys, kUnits>(
          ring + S::kStage,
          tile::head_rows(p.key, part.batch, part.kv_head,
                          kGathered ? 0 : p.rows.past + part.chunk_first + part.first_key),
          [&](int r) {
            if (part.first_key + r >= columns) return -1;
            return kGathered ? row_of_member(p, set, part.first_key + r) : r;
          });
      ahead.advance(part);
      if (ahead.head < part.end_head) store_offset(1, load_offset(part, ahead));
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  const Part& part = shared.part;
  uint32_t keys[kUnits / 2][kM][4];
  {
    const int lane = thread % 32;
    const tile::LaneRow<kUnits> lanes(layout::load_a_row(lane), layout::load_a_unit(lane));
#pragma unroll
    for (int k = 0; k < kUnits / 2; ++k) {
      tile::load_a(keys[k], ring + S::kStage + warp_key * kDim, lanes, k);
    }
  }
  __syncthreads();
  if (ahead.head < part.end_head) load_query(part, ahead, 1);
  ptx::cp_async_commit();

  float sum[kM][2] = {};
  int stage = 0;
#pragma unroll 1
  while (now.head < part.end_head) {
    const int free_stage = stage == 0 ? 2 : stage - 1;
    float offset = 0.0F;
    ahead.advance(part);
    if (ahead.head < part.end_head) {
      load_query(part, ahead, free_stage);
      offset = load_offset(part, ahead);
    }
    ptx::cp_async_commit();

    const int lane = tile::recomputed(thread % 32);
    const int first_key = kGathered ? 0 : part.first_key + warp_key;
    if (kGathered || now.row + kRows > first_key) {
      const bool masked = !kGathered && now.row < first_key + S::kWarpKeys - 1;
      const auto add = [&](auto capped) {
        add_tile<dtype, kUnits, kRows, decltype(capped)::value>(sum, keys, ring + stage * S::kStage,
                                                                shared.offsets[stage], p, masked,
                                                                now.row - first_key, lane);
      };
      if (p.cap_scale != 0.0F) {
        add(std::true_type());
      } else {
        add(std::false_type());
      }
    }
    store_offset(free_stage, offset);
    stage = stage == 2 ? 0 : stage + 1;

    const int head = now.head;
    now.advance(part);
    if (now.head != head) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float of_head = sum[m][h] + __shfl_xor_sync(0xFFFFFFFFU, sum[m][h], 1);
          of_head += __shfl_xor_sync(0xFFFFFFFFU, of_head, 2);
          sum[m][h] = 0.0F;
          float& total = shared.totals[warp_key + 16 * m + layout::accumulator_row(lane, 2 * h)];
          if (lane % 4 == 0) total = p.reduce_max ? fmaxf(total, of_head) : total + of_head;
        }
      }
    }
    // Of the two groups of copies under way, the older one is the next tile's.
    ptx::cp_async_wait<1>();
    __syncthreads();
  }

  const int columns = kGathered ? static_cast<int>(p.memory.width) : part.chunk_rows;
  if (thread >= S::kKeys || part.first_key + thread >= columns) return;
  const int column =
      part.first_key + thread + (kGathered ? 0 : part.chunk_first - static_cast<int>(p.rows.begin));
  store_total<kGathered>(grid, part, column, shared.totals[thread]);
}

}  // namespace h2o_prefill::column_sums
