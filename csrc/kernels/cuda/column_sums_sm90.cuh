// Column sums of 16-bit dtypes with the warpgroup instructions of sm_90a.
//
// As in column_sums.cuh a block owns a tile of keys, computes S^T = K Q^T against one query tile
// after another and adds exp(s - lse) up in registers, in a fixed order. Its first warpgroup
// copies: the keys, and query tiles with their lse into a ring. The other two have 64 keys each and
// take the tiles two at a time: both products are issued, and the weights of the first are added up
// while the second is under way.
#pragma once

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/pipeline_sm90.cuh"

namespace h2o_prefill::column_sums_sm90 {

using column_sums::Grid;
using column_sums::Part;

constexpr int kGroupKeys = sm90::kGroupRows;
constexpr int kKeys = sm90::kBlockRows;
constexpr int kRows = 128;  // of a query tile
constexpr int kSums = 2;    // keys of a thread

using QueryTile = column_sums::QueryTile<kRows>;

// Sizes for rows of kDim elements, 64 or 128, to which D is padded.
template <int kDim>
struct Shape {
  static constexpr int kSlabs = kDim / layout_sm90::kSlabColumns;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kStages = 4;  // two pairs of query tiles
  static_assert(kDim % layout_sm90::kSlabColumns == 0);

  // In the block's shared memory from its first multiple of kAlignment on.
  struct Shared {
    uint16_t keys[kKeys * kDim];
    uint16_t query[kStages][kRows * kDim];
    float offsets[kStages][kRows];
    // Barriers of query tiles with their offsets; the first ones also wait for the keys, whose
    // copies begin before.
    sm90::RingBarriers<kStages> ring;
  };
};

// How many query tiles the part is. Absent members of a memory set are its last ones: a tile
// without keys needs no query.
template <bool kGathered>
__device__ __forceinline__ int count_tiles(const Part& part, const int32_t* set) {
  if (part.first_row >= part.end_row || (kGathered && set[part.first_key] < 0)) return 0;
  return (part.end_head - part.first_head) * divide_up(part.end_row - part.first_row, kRows);
}

// The first warpgroup.
template <int kDim, bool kGathered>
__device__ __forceinline__ void produce(typename Shape<kDim>::Shared& shared,
                                        const ColumnSumsParams& p, const Part& part,
                                        const int32_t* set, int tiles, int thread) {
  using S = Shape<kDim>;
  const int columns = kGathered ? static_cast<int>(p.memory.width) : part.chunk_rows;
  const int own = sm90::row_of_lane(thread);
  int key = -1;
  if (part.first_key + own < columns) {
    key = kGathered ? column_sums::row_of_member(p, set, part.first_key + own) : own;
  }
  sm90::copy_rows<kKeys, S::kSlabs>(
      shared.keys,
      tile::head_rows(p.key, part.batch, part.kv_head,
                      kGathered ? 0 : p.rows.past + part.chunk_first + part.first_key),
      key, thread);

  // Loaded a tile ahead, to hide the latency.
  QueryTile now{part.first_head, part.first_row};
  const auto load_lse = [&] {
    const int row = now.row + thread;
    if (row >= part.end_row || now.head >= part.end_head) return kNegInf;
    const int64_t list = part.batch * p.query.heads + now.head;
    return p.lse[list * p.query.length + part.chunk_first + row];
  };
  float lse = load_lse();
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const int stage = sm90::Turn<S::kStages>(i).stage;
    shared.ring.wait_for_space(i);
    sm90::copy_rows<kRows, S::kSlabs>(
        shared.query[stage], tile::head_rows(p.query, part.batch, now.head, part.chunk_first),
        now.row + own < part.end_row ? now.row + own : -1, thread);
    shared.offsets[stage][thread] = column_sums::offset_of(lse);
    shared.ring.arrive_full(i, thread);
    now.advance(part);
    lse = load_lse();
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
__device__ __forceinline__ void add_weights(float (&sum)[kSums], const float (&s)[kRows / 2],
                                            const float* offsets, float scale, int first_row,
                                            int thread) {
  // The thread's first row, and for each of its keys how far from there the first one that counts
  // is.
  const int row = layout_sm90::accumulator_column(thread, 0);
  const int begin[kSums] = {layout_sm90::accumulator_row(thread, 0) - first_row - row,
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
  float of_head[kSums];
  float of_all[kSums];

  __device__ __forceinline__ void end_head(bool reduce_max) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float sum = of_head[i] + __shfl_xor_sync(0xFFFFFFFFU, of_head[i], 1);
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
      of_head[i] = 0.0F;
      of_all[i] = reduce_max ? fmaxf(of_all[i], sum) : of_all[i] + sum;
    }
  }
};

// Warpgroup `group` of the consumers.
template <DType dtype, int kDim, bool kGathered>
__device__ __forceinline__ Totals consume(typename Shape<kDim>::Shared& shared,
                                          const ColumnSumsParams& p, const Part& part, int tiles,
                                          int group, int thread) {
  using S = Shape<kDim>;
  const auto descriptor_of = [](const uint16_t* slabs) {
    return layout_sm90::slab_descriptor(ptx::shared_address(slabs));
  };
  const uint64_t keys = descriptor_of(shared.keys + group * kGroupKeys * layout_sm90::kSlabColumns);
  const uint64_t query = descriptor_of(shared.query[0]);
  constexpr uint64_t kStage = kRows * kDim * sizeof(uint16_t) / layout::kUnitBytes;
  const int first_key = kGathered ? 0 : part.first_key + group * kGroupKeys;
  QueryTile now{part.first_head, part.first_row};
  Totals totals{};

  const auto issue = [&](float (&s)[kRows / 2], int i) {
    multiply<dtype, kDim>(s, keys, query + sm90::Turn<S::kStages>(i).stage * kStage);
  };
  const auto use = [&](float (&s)[kRows / 2], int i) {
    ptx::fence_accumulators(s);
    const int stage = sm90::Turn<S::kStages>(i).stage;
    const int first_row = now.row - first_key;
    if (!kGathered && first_row < kGroupKeys - 1) {
      add_weights<true>(totals.of_head, s, shared.offsets[stage], p.scale_log2, first_row, thread);
    } else {
      add_weights<false>(totals.of_head, s, shared.offsets[stage], p.scale_log2, first_row, thread);
    }
    shared.ring.release(i, thread);
    const int head = now.head;
    now.advance(part);
    if (now.head != head) totals.end_head(p.reduce_max);
  };
  const sm90::Turns turns{group};
  turns.begin();
  int i = 0;
#pragma unroll 1
  for (; i + 1 < tiles; i += 2) {
    float first[kRows / 2];
    float second[kRows / 2];
    shared.ring.wait_for_tile(i);
    shared.ring.wait_for_tile(i + 1);
    ptx::fence_async_proxy();
    turns.wait();
    ptx::fence_accumulators(first);
    ptx::fence_accumulators(second);
    ptx::wgmma_fence();
    issue(first, i);
    issue(second, i + 1);
    turns.give();
    ptx::wgmma_wait<1>();
    use(first, i);
    ptx::wgmma_wait<0>();
    use(second, i + 1);
  }
  if (i < tiles) {
    float last[kRows / 2];
    shared.ring.wait_for_tile(i);
    ptx::fence_async_proxy();
    turns.wait();
    ptx::fence_accumulators(last);
    ptx::wgmma_fence();
    issue(last, i);
    turns.give();
    ptx::wgmma_wait<0>();
    use(last, i);
  }
  turns.end();
  return totals;
}

template <DType dtype, int kDim, bool kGathered>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    column_sums_sm90_kernel(const __grid_constant__ Grid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim>;
  const ColumnSumsParams& p = grid.params;
  const Part part = column_sums::part_of_block<kKeys, kGathered>(grid);
  const int columns = kGathered ? static_cast<int>(p.memory.width) : part.chunk_rows;
  auto& shared = sm90::aligned_shared<typename S::Shared>();
  if (threadIdx.x == 0) shared.ring.init();
  __syncthreads();
  ptx::wait_for_earlier_launches();
  if (part.first_key >= columns) return;

  const int32_t* const set =
      kGathered ? p.memory.of_unit(part.batch * p.key.heads + part.kv_head) : nullptr;
  const int tiles = count_tiles<kGathered>(part, set);
  const int thread = static_cast<int>(threadIdx.x) % sm90::kWarpgroupThreads;
  const int warpgroup = sm90::warpgroup_of_thread();
  if (warpgroup == 0) {
    ptx::decrease_registers<sm90::kProducerRegisters>();
    if (tiles > 0) produce<kDim, kGathered>(shared, p, part, set, tiles, thread);
    return;
  }
  ptx::increase_registers<sm90::kConsumerRegisters>();
  const int group = warpgroup - 1;
  const Totals totals = consume<dtype, kDim, kGathered>(shared, p, part, tiles, group, thread);

  if (thread % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int key =
        part.first_key + group * kGroupKeys + layout_sm90::accumulator_row(thread, 2 * i);
    if (key >= columns) continue;
    const int column = key + (kGathered ? 0 : part.chunk_first - static_cast<int>(p.rows.begin));
    if (grid.head_parts * grid.row_parts == 1) {
      column_sums::store_sum<kGathered>(p, part.batch * p.key.heads + part.kv_head, column,
                                        totals.of_all[i]);
    } else {
      const int64_t list =
          (part.row_part * p.query.batch + part.batch) * p.query.heads + part.first_head;
      p.partial[list * (kGathered ? p.memory.width : p.rows.count) + column] = totals.of_all[i];
    }
  }
#endif
}

}  // namespace h2o_prefill::column_sums_sm90
