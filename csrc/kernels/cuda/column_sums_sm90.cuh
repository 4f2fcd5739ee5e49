// Column sums of 16-bit dtypes with the warpgroup instructions of sm_90a.
//
// As in column_sums.cuh a tile of keys stays, S^T = K Q^T is computed against one query tile after
// another, and exp(s - lse) is added up in registers, in a fixed order. A block's first warpgroup
// copies tiles of keys, and query tiles with their lse, into two rings. The other two have 64 keys
// of each half of the keys: both halves' products with a query tile are issued together, and the
// weights of the first are added up while the second is under way.
//
// Chunks have a block for each tile of keys. Tiles of memory sets are few: one block for each
// multiprocessor takes an equal number of their parts, and copies the next keys while it uses the
// ones before.
#pragma once

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/pipeline_sm90.cuh"

namespace h2o_prefill::column_sums_sm90 {

using column_sums::Grid;
using column_sums::Part;

constexpr int kGroupKeys = sm90::kGroupRows;
constexpr int kHalfKeys = sm90::kBlockRows;
constexpr int kHalves = 2;
constexpr int kKeys = kHalves * kHalfKeys;
constexpr int kRows = 128;    // of a query tile
constexpr int kHalfSums = 2;  // keys of a thread in each half

using QueryTile = column_sums::QueryTile<kRows>;

// A tile of the keys of a unit's memory set.
struct KeyTile {
  int unit;
  int tile;
  bool has_second_half;
};

// Sizes for rows of kDim elements, 64 or 128, to which D is padded.
template <int kDim>
struct Shape {
  static constexpr int kSlabs = kDim / layout_sm90::kSlabColumns;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kKeyStages = 2;
  static constexpr int kStages = 3;
  static_assert(kDim % layout_sm90::kSlabColumns == 0);

  // In the block's shared memory from its first multiple of kAlignment on.
  struct Shared {
    uint16_t keys[kKeyStages][kKeys * kDim];
    uint16_t query[kStages][kRows * kDim];
    float offsets[kStages][kRows];
    KeyTile key_tiles[kKeyStages];
    sm90::RingBarriers<kKeyStages> key_ring;  // of keys, and what tile they are
    sm90::RingBarriers<kStages> query_ring;   // of query tiles with their offsets
  };
};

// The parts [begin, end) of a block, counted over the tiles of all memory sets that have members.
struct Share {
  int begin;
  int end;
  int of_tile;  // parts of a tile

  // One more than the last part of the tile of this one.
  __device__ __forceinline__ int end_of_tile(int part) const {
    return min(end, (part / of_tile + 1) * of_tile);
  }
};

// Whether a tile of a unit's memory set has members: absent ones are the last.
__device__ __forceinline__ bool has_members(const ColumnSumsParams& p, int unit, int first_key) {
  return first_key < p.memory.width && p.memory.of_unit(unit)[first_key] >= 0;
}

template <bool kGathered>
__device__ __forceinline__ Share share_of_block(const Grid& grid, int lane) {
  if constexpr (!kGathered) {
    return {0, 1, 1};
  } else {
    const int tiles = static_cast<int>(grid.tiles);
    const int filled = sm90::count_if<4>(static_cast<int>(grid.units) * tiles, lane, [&](int i) {
      return has_members(grid.params, i / tiles, i % tiles * kKeys);
    });
    const int of_tile = static_cast<int>(grid.head_parts * grid.row_parts);
    const auto first = [&](uint32_t block) {
      return static_cast<int>(int64_t{block} * filled * of_tile / gridDim.x);
    };
    return {first(blockIdx.x), first(blockIdx.x + 1), of_tile};
  }
}

// The tile that is number `n` of those with members.
__device__ __forceinline__ KeyTile find_tile(const Grid& grid, int n, int lane) {
  const int tiles = static_cast<int>(grid.tiles);
  for (int first = 0;; first += 32) {
    const int i = first + lane;
    const bool filled = i < static_cast<int>(grid.units) * tiles &&
                        has_members(grid.params, i / tiles, i % tiles * kKeys);
    const uint32_t filled_lanes = __ballot_sync(0xFFFFFFFFU, filled);
    const int before = __popc(filled_lanes & ((1U << lane) - 1));
    const uint32_t lane_bit = __ballot_sync(0xFFFFFFFFU, filled && before == n);
    if (lane_bit) {
      const int tile = first + __popc(lane_bit - 1);  // one lane's bit
      return {tile / tiles, tile % tiles, false};
    }
    n -= __popc(filled_lanes);
  }
}

// Part `part` of a block: of `keys`, or of the block's tile of a chunk.
template <bool kGathered>
__device__ __forceinline__ Part part_of_share(const Grid& grid, const Share& share,
                                              const KeyTile& keys, int part) {
  if constexpr (!kGathered) {
    return column_sums::part_of_block<kKeys, false>(grid);
  } else {
    const int i = part % share.of_tile;
    const int row_parts = static_cast<int>(grid.row_parts);
    return column_sums::part_of<kKeys, true>(
        grid, {keys.unit, i / row_parts, i % row_parts, 0, keys.tile});
  }
}

__device__ __forceinline__ int count_query_tiles(const Part& part) {
  return (part.end_head - part.first_head) *
         divide_up(max(part.end_row - part.first_row, 0), kRows);
}

// The first warpgroup.
template <int kDim, bool kGathered>
__device__ __forceinline__ void produce(typename Shape<kDim>::Shared& shared, const Grid& grid,
                                        const Share& share, int thread) {
  using S = Shape<kDim>;
  const ColumnSumsParams& p = grid.params;
  const int lane_row = sm90::row_of_lane(thread);
  KeyTile keys{};
  if (kGathered && share.begin < share.end) {
    keys = find_tile(grid, share.begin / share.of_tile, thread % 32);
  }
  int number = 0;
  int key_number = 0;
#pragma unroll 1
  for (int i = share.begin; i < share.end; ++key_number) {
    Part part = part_of_share<kGathered>(grid, share, keys, i);
    const int stage = sm90::Turn<S::kKeyStages>(key_number).stage;
    const int columns = kGathered ? static_cast<int>(p.memory.width) : part.chunk_rows;
    const int32_t* const set = kGathered ? p.memory.of_unit(keys.unit) : nullptr;
    if constexpr (kGathered) {
      keys.has_second_half = has_members(p, keys.unit, part.first_key + kHalfKeys);
    }
    int rows[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int key = part.first_key + half * kHalfKeys + lane_row;
      rows[half] = key >= columns ? -1
                   : kGathered    ? column_sums::row_of_member(p, set, key)
                                  : half * kHalfKeys + lane_row;
    }
    shared.key_ring.wait_for_space(key_number);
    if (kGathered && thread == 0) shared.key_tiles[stage] = keys;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      sm90::copy_rows<kHalfKeys, S::kSlabs, kKeys>(
          shared.keys[stage] + half * kHalfKeys * layout_sm90::kSlabColumns,
          tile::head_rows(p.key, part.batch, part.kv_head,
                          kGathered ? 0 : p.rows.past + part.chunk_first + part.first_key),
          rows[half], thread);
    }
    shared.key_ring.arrive_full(key_number, thread);

    const int end = share.end_of_tile(i);
#pragma unroll 1
    for (; i < end; ++i) {
      part = part_of_share<kGathered>(grid, share, keys, i);
      QueryTile now{part.first_head, part.first_row};
#pragma unroll 1
      for (int left = count_query_tiles(part); left > 0; --left, ++number) {
        const int row = now.row + thread;
        float lse = kNegInf;  // it comes while the thread waits for space
        if (row < part.end_row) {
          const int64_t list = part.batch * p.query.heads + now.head;
          lse = p.lse[list * p.query.length + part.chunk_first + row];
        }
        const int to = sm90::Turn<S::kStages>(number).stage;
        shared.query_ring.wait_for_space(number);
        sm90::copy_rows<kRows, S::kSlabs>(
            shared.query[to], tile::head_rows(p.query, part.batch, now.head, part.chunk_first),
            now.row + lane_row < part.end_row ? now.row + lane_row : -1, thread);
        shared.offsets[to][thread] = column_sums::offset_of(lse);
        shared.query_ring.arrive_full(number, thread);
        now.advance(part);
      }
    }
    if (kGathered && i < share.end) {
      ++keys.tile;
      while (!has_members(p, keys.unit, keys.tile * kKeys)) keys = {keys.unit + 1, 0, false};
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Issues s = K Q^T, 64 keys by one query tile, as one group.
template <DType dtype, int kDim>
__device__ __forceinline__ void multiply(float (&s)[kRows / 2], uint64_t keys, uint64_t query) {
#pragma unroll
  for (int k = 0; k < Shape<kDim>::kSteps; ++k) {
    ptx::wgmma_m64n128k16<dtype>(s, keys + layout_sm90::descriptor_step(k, kKeys),
                                 query + layout_sm90::descriptor_step(k, kRows), k > 0);
  }
  ptx::wgmma_commit();
}

// sum += the weights of one query tile. If masked, key k of the warpgroup counts for rows from k
// on, where row 0 of the tile is row `first_row`.
template <bool kMasked>
__device__ __forceinline__ void add_weights(float (&sum)[kHalfSums], const float (&s)[kRows / 2],
                                            const float* offsets, float scale, int first_row,
                                            int thread) {
  // The thread's first row, and for each of its keys how far from there the first one that counts
  // is.
  const int row = layout_sm90::accumulator_column(thread, 0);
  const int begin[kHalfSums] = {layout_sm90::accumulator_row(thread, 0) - first_row - row,
                                layout_sm90::accumulator_row(thread, 2) - first_row - row};
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(offsets + row + 8 * n);
    const float row_offsets[2] = {pair.x, pair.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float weight = ptx::exp2(s[4 * n + i] * scale - row_offsets[i % 2]);
      if (kMasked && 8 * n + i % 2 < begin[i / 2]) weight = 0.0F;
      sum[i / 2] += weight;
    }
  }
}

// The sums of a thread's keys over the queries of the part; the 4 threads that share keys have the
// same.
struct Totals {
  float of_head[kHalves][kHalfSums];
  float of_all[kHalves][kHalfSums];

  __device__ __forceinline__ void end_head(bool reduce_max) {
#pragma unroll
    for (int i = 0; i < kHalves * kHalfSums; ++i) {
      float& of_one = of_head[i / kHalfSums][i % kHalfSums];
      float& all = of_all[i / kHalfSums][i % kHalfSums];
      float sum = of_one + __shfl_xor_sync(0xFFFFFFFFU, of_one, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
      of_one = 0.0F;
      all = reduce_max ? fmaxf(all, sum) : all + sum;
    }
  }
};

// Stores the sums of the part's keys that the thread has, of warpgroup `group`.
template <bool kGathered>
__device__ __forceinline__ void store_totals(const Grid& grid, const Part& part,
                                             const Totals& totals, int group, int thread) {
  const ColumnSumsParams& p = grid.params;
  const int columns = static_cast<int>(kGathered ? p.memory.width : part.chunk_rows);
  if (thread % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < kHalves * kHalfSums; ++i) {
    const int key = part.first_key + i / kHalfSums * kHalfKeys + group * kGroupKeys +
                    layout_sm90::accumulator_row(thread, 2 * (i % kHalfSums));
    if (key >= columns) continue;
    const int column = key + (kGathered ? 0 : part.chunk_first - static_cast<int>(p.rows.begin));
    column_sums::store_total<kGathered>(grid, part, column,
                                        totals.of_all[i / kHalfSums][i % kHalfSums]);
  }
}

// Warpgroup `group` of the consumers.
template <DType dtype, int kDim, bool kGathered>
__device__ __forceinline__ void consume(typename Shape<kDim>::Shared& shared, const Grid& grid,
                                        const Share& share, int group, int thread) {
  using S = Shape<kDim>;
  const ColumnSumsParams& p = grid.params;
  const auto descriptor_of = [](const uint16_t* slabs) {
    return layout_sm90::slab_descriptor(ptx::shared_address(slabs));
  };
  const auto units = [](int rows, int columns) {
    return static_cast<uint64_t>(rows) * columns * sizeof(uint16_t) / layout::kUnitBytes;
  };
  const uint64_t key_slabs =
      descriptor_of(shared.keys[0] + group * kGroupKeys * layout_sm90::kSlabColumns);
  const uint64_t query_slabs = descriptor_of(shared.query[0]);
  const sm90::Turns turns{group};
  turns.begin();
  int number = 0;
  int key_number = 0;
#pragma unroll 1
  for (int i = share.begin; i < share.end; ++key_number) {
    const int key_stage = sm90::Turn<S::kKeyStages>(key_number).stage;
    shared.key_ring.wait_for_tile(key_number);
    const KeyTile tile = kGathered ? shared.key_tiles[key_stage] : KeyTile{};
    const uint64_t first_keys = key_slabs + key_stage * units(kKeys, kDim);
    const uint64_t second_keys = first_keys + units(kHalfKeys, layout_sm90::kSlabColumns);
    const int end = share.end_of_tile(i);
#pragma unroll 1
    for (; i < end; ++i) {
      const Part part = part_of_share<kGathered>(grid, share, tile, i);
      QueryTile now{part.first_head, part.first_row};
      Totals totals{};
#pragma unroll 1
      for (int left = count_query_tiles(part); left > 0; --left, ++number) {
        const int stage = sm90::Turn<S::kStages>(number).stage;
        const uint64_t query = query_slabs + stage * units(kRows, kDim);
        const float* const offsets = shared.offsets[stage];
        // Of a chunk's tile, the first query tile of a head sees the first half up to itself, the
        // second one sees all of it, and the second half up to itself.
        const int rows_before = now.row - part.first_row;
        const bool both = kGathered ? tile.has_second_half : rows_before > 0;
        const auto add = [&](float (&s)[kRows / 2], int half, bool masked) {
          ptx::fence_accumulators(s);
          if (!kGathered && masked) {
            const int first_row = rows_before - half * kHalfKeys - group * kGroupKeys;
            add_weights<true>(totals.of_head[half], s, offsets, p.scale_log2, first_row, thread);
          } else {
            add_weights<false>(totals.of_head[half], s, offsets, p.scale_log2, 0, thread);
          }
        };
        shared.query_ring.wait_for_tile(number);
        ptx::fence_async_proxy();
        turns.wait();
        if (both) {
          float first[kRows / 2];
          float second[kRows / 2];
          ptx::fence_accumulators(first);
          ptx::fence_accumulators(second);
          ptx::wgmma_fence();
          multiply<dtype, kDim>(first, first_keys, query);
          multiply<dtype, kDim>(second, second_keys, query);
          turns.give();
          ptx::wgmma_wait<1>();
          add(first, 0, false);
          ptx::wgmma_wait<0>();
          add(second, 1, rows_before == kRows);
        } else {
          float only[kRows / 2];
          ptx::fence_accumulators(only);
          ptx::wgmma_fence();
          multiply<dtype, kDim>(only, first_keys, query);
          turns.give();
          ptx::wgmma_wait<0>();
          add(only, 0, !kGathered);
        }
        shared.query_ring.release(number, thread);
        const int head = now.head;
        now.advance(part);
        if (now.head != head) totals.end_head(p.reduce_max);
      }
      store_totals<kGathered>(grid, part, totals, group, thread);
    }
    shared.key_ring.release(key_number, thread);
  }
  turns.end();
}

template <DType dtype, int kDim, bool kGathered>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    column_sums_sm90_kernel(const __grid_constant__ Grid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& shared = sm90::aligned_shared<typename Shape<kDim>::Shared>();
  if (threadIdx.x == 0) {
    shared.key_ring.init();
    shared.query_ring.init();
  }
  __syncthreads();
  ptx::wait_for_earlier_launches();
  const int thread = static_cast<int>(threadIdx.x) % sm90::kWarpgroupThreads;
  const int warpgroup = sm90::warpgroup_of_thread();
  const Share share = share_of_block<kGathered>(grid, thread % 32);
  if (warpgroup == 0) {
    ptx::decrease_registers<sm90::kProducerRegisters>();
    produce<kDim, kGathered>(shared, grid, share, thread);
  } else {
    ptx::increase_registers<sm90::kConsumerRegisters>();
    consume<dtype, kDim, kGathered>(shared, grid, share, warpgroup - 1, thread);
  }
#endif
}

}  // namespace h2o_prefill::column_sums_sm90
