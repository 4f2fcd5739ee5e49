// Forward attention of 16-bit dtypes with the warpgroup instructions of sm_90a.
//
// A block takes one tile of 128 query rows after another. Its first warpgroup copies the query, and
// tiles of 128 keys and of their values into two rings, as far ahead as there is room, over the
// ends of query tiles too. The other two have 64 rows each and keep logits, weights and outputs in
// registers: S = Q K^T of a tile of keys and O += P V of the one before are issued together, and
// the softmax of S is computed while O is under way.
//
// Masks, softmax and results come from forward_rows.cuh.
#pragma once

#include "kernels/cuda/forward_rows.cuh"
#include "kernels/cuda/pipeline_sm90.cuh"

namespace h2o_prefill::attend_sm90 {

using attend::ForwardGrid;
using attend::KeyKind;
using attend::RowTile;

// Sizes for rows of kDim elements, 64 or 128, to which D and Dv are padded.
template <int kDim>
struct Shape {
  static constexpr int kSlabs = kDim / layout_sm90::kSlabColumns;
  static constexpr int kUnits = kDim / tile::kUnitElements;
  static constexpr int kRows = sm90::kBlockRows;
  static constexpr int kKeys = 128;
  static constexpr int kStages = 2;
  static constexpr int kValueStages = 3;  // keys are needed first, and wait for no space of values
  static_assert(kDim % layout_sm90::kSlabColumns == 0);

  // A tile of keys is resolved before there is space for it, while the tiles in the ring are used.
  static constexpr int kSlots = 4;
  static_assert(kSlots > kStages);
  using Causal = attend::CausalKeys<sm90::kGroupRows, kKeys>;
  using Limited = attend::LimitedKeys<sm90::kGroupRows, kKeys>;
  using Gathered = attend::GatheredKeys<kRows, kKeys, kSlots>;

  // In the block's shared memory.
  struct Shared {
    uint16_t query[kRows * kDim];
    uint16_t key[kStages][kKeys * kDim];
    uint16_t value[kValueStages][kKeys * kDim];
    uint16_t result[kRows * kDim];  // each warp's rows are its own
    typename Gathered::Shared gathered;
    int memory_tiles;  // of the row tile whose query is there
    int tiles;
    sm90::RingBarriers<1> query_ring;  // of the query and the two numbers
    sm90::RingBarriers<kStages> key_ring;
    sm90::RingBarriers<kValueStages> value_ring;
  };
};

// Calls use(rows) for every row tile of this block.
template <KeyKind kKind, typename Use>
__device__ __forceinline__ void for_each_row_tile(const ForwardGrid& grid, const Use& use) {
#pragma unroll 1
  for (uint32_t number = blockIdx.x; number < grid.row_tiles(); number += gridDim.x) {
    const RowTile rows = attend::row_tile<sm90::kBlockRows, kKind>(grid, number);
    if (rows.count > 0) use(rows);
  }
}

// The first warpgroup.
template <int kDim, KeyKind kKind>
__device__ __forceinline__ void produce(typename Shape<kDim>::Shared& shared,
                                        const ForwardGrid& grid, int thread) {
  using S = Shape<kDim>;
  using Keys = attend::KeysOf<S, kKind>;
  constexpr bool kGathered = kKind == KeyKind::kGathered;
  const AttendForwardParams& p = grid.params;
  const auto sync = [] {
    ptx::named_barrier_sync(sm90::kFirstFreeBarrier, sm90::kWarpgroupThreads);
  };
  int row_tiles = 0;
  int key_tiles = 0;
  for_each_row_tile<kKind>(grid, [&](const RowTile& rows) {
    if constexpr (kGathered) sync();  // nobody looks up keys of the last row tile
    Keys keys(p, rows, &shared.gathered);
    int memory_tiles = 0;
    if constexpr (kGathered) {
      sync();
      const int32_t* const set = p.memory.positions + shared.gathered.memory;
      // Tiles whose first key is there: absent members, and keys that no row sees, are the last.
      const auto count_tiles = [&](int count, const auto& is_there) {
        return sm90::count_if<1>(divide_up(count, S::kKeys), thread % 32,
                                 [&](int tile) { return is_there(tile * S::kKeys); });
      };
      memory_tiles =
          count_tiles(static_cast<int>(p.memory.width), [&](int i) { return set[i] >= 0; });
      const int last = rows.position + rows.count - 1;
      keys.tiles = memory_tiles + count_tiles(shared.gathered.entries,
                                              [&](int i) { return keys.is_seen_from(i, last); });
      keys.memory_tiles = memory_tiles;
      keys.first_slot = key_tiles % S::kSlots;
    }
    const tile::HeadRows key_rows =
        tile::head_rows(p.key, rows.batch, rows.kv_head, rows.key_begin);
    const tile::HeadRows value_rows =
        tile::head_rows(p.value, rows.batch, rows.kv_head, rows.key_begin);

    const int lane_row = sm90::row_of_lane(thread);
    typename Keys::Lookup lookup = keys.prepare(0, lane_row);
    shared.query_ring.wait_for_space(row_tiles);
    const attend::TileUnits query(p.query, rows);
    sm90::copy_rows<S::kRows, S::kSlabs>(
        shared.query, query.rows_of(p.query),
        query.row_of(grid.place<kKind>(rows, lane_row), rows.count), thread);
    if (thread == 0) {
      shared.memory_tiles = memory_tiles;
      shared.tiles = keys.tiles;
    }
    shared.query_ring.arrive_full(row_tiles++, thread);

    int row = -1;  // that the lane has looked up, of tile j and of the one before
    int row_before = -1;
    const auto resolve = [&](int j) {
      row = keys.resolve(j, lane_row, lookup);
      lookup = keys.prepare(j + 1, lane_row);
    };
    if (keys.tiles > 0) resolve(0);
#pragma unroll 1
    for (int j = 0; j <= keys.tiles; ++j) {
      const int i = key_tiles + j;
      if (j < keys.tiles) {
        shared.key_ring.wait_for_space(i);
        sm90::copy_rows<S::kKeys, S::kSlabs>(shared.key[sm90::Turn<S::kStages>(i).stage], key_rows,
                                             row, thread);
        shared.key_ring.arrive_full(i, thread);
      }
      if (j > 0) {
        shared.value_ring.wait_for_space(i - 1);
        sm90::copy_rows<S::kKeys, S::kSlabs>(shared.value[sm90::Turn<S::kValueStages>(i - 1).stage],
                                             value_rows, row_before, thread);
        shared.value_ring.arrive_full(i - 1, thread);
      }
      row_before = row;
      if (j + 1 < keys.tiles) resolve(j + 1);
    }
    key_tiles += keys.tiles;
  });
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Issues s = Q K^T, 64 rows by one tile of keys, as one group.
template <DType dtype, int kDim>
__device__ __forceinline__ void multiply_keys(float (&s)[Shape<kDim>::kKeys / 2], uint64_t query,
                                              uint64_t key) {
  using S = Shape<kDim>;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    ptx::wgmma_m64n128k16<dtype>(s, query + layout_sm90::descriptor_step(k, S::kRows),
                                 key + layout_sm90::descriptor_step(k, S::kKeys), k > 0);
  }
  ptx::wgmma_commit();
}

// Weights of 64 rows and one tile of keys, as wgmma takes them from registers.
template <int kKeys>
struct Weights {
  uint32_t a[kKeys / 16][4];

  template <DType dtype>
  __device__ __forceinline__ void round(const float (&s)[kKeys / 2]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[k][i] = ptx::pack_pair<dtype>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
      }
    }
  }

  // Before the product that reads them is issued, and after the wait for it.
  __device__ __forceinline__ void fence() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) ptx::fence_operand(a[k]);
  }
};

// Issues out += P V as one group.
template <DType dtype, int kDim>
__device__ __forceinline__ void multiply_values(float (&out)[kDim / 2],
                                                const Weights<Shape<kDim>::kKeys>& weights,
                                                uint64_t value) {
#pragma unroll
  for (int k = 0; k < Shape<kDim>::kKeys / 16; ++k) {
    ptx::wgmma_rows_of_b<dtype>(out, weights.a[k], value + layout_sm90::descriptor_row_step(k));
  }
  ptx::wgmma_commit();
}

// A warpgroup's accumulators, which forward_rows.cuh reads as 16 rows of a warp.
template <int n>
__device__ __forceinline__ float (&by_tiles(float (&c)[n]))[1][n / 4][4] {
  return reinterpret_cast<float (&)[1][n / 4][4]>(c);
}

// Warpgroup `group` of the consumers.
template <DType dtype, int kDim, KeyKind kKind>
__device__ __forceinline__ void consume(typename Shape<kDim>::Shared& shared,
                                        const ForwardGrid& grid, int group, int thread) {
  using S = Shape<kDim>;
  constexpr bool kGathered = kKind == KeyKind::kGathered;
  // The producer keeps positions of gathered keys in shared memory.
  using Keys = std::conditional_t<kGathered, typename S::Causal, attend::KeysOf<S, kKind>>;
  constexpr int kWarpRows = 16;
  constexpr uint64_t kStage = S::kKeys * kDim * sizeof(uint16_t) / layout::kUnitBytes;
  const AttendForwardParams& p = grid.params;
  const uint64_t query = layout_sm90::slab_descriptor(
      ptx::shared_address(shared.query + group * sm90::kGroupRows * layout_sm90::kSlabColumns));
  const uint64_t key = layout_sm90::slab_descriptor(ptx::shared_address(shared.key[0]));
  const uint64_t value =
      layout_sm90::slab_rows_descriptor(ptx::shared_address(shared.value[0]), S::kKeys);
  const int lane = thread % 32;
  const int warp_row = group * sm90::kGroupRows + thread / 32 * kWarpRows;
  uint16_t* const warp_tile = shared.result + warp_row * kDim;
  const sm90::Turns turns{group};
  turns.begin();
  int row_tiles = 0;
  int key_tiles = 0;
  for_each_row_tile<kKind>(grid, [&](const RowTile& rows) {
    __syncwarp();  // all lanes have stored the last result
    if (p.merge_with_out) {
      attend::load_result<kKind, S::kUnits, kWarpRows>(grid, rows, warp_tile, warp_row);
    }
    const Keys keys(p, rows, nullptr);
    shared.query_ring.wait_for_tile(row_tiles);
    const int tiles = kGathered ? shared.tiles : keys.tiles;
    const int memory_tiles = kGathered ? shared.memory_tiles : 0;

    float s[S::kKeys / 2];
    float out[kDim / 2] = {};
    Weights<S::kKeys> weights;
    attend::OnlineSoftmax<1> softmax;
    attend::OnlineSoftmax<1> of_memory;
    const auto key_of = [&](int j) {
      return key + sm90::Turn<S::kStages>(key_tiles + j).stage * kStage;
    };
    const auto value_of = [&](int j) {
      return value + sm90::Turn<S::kValueStages>(key_tiles + j).stage * kStage;
    };
    // Replaces the products of key tile j by weights.
    const auto weigh = [&](int j) {
      ptx::fence_accumulators(s);
      if (j + 1 == tiles) shared.query_ring.release(row_tiles, thread);
      if constexpr (kGathered) {
        const int slot = static_cast<uint32_t>(key_tiles + j) % S::kSlots;
        if (j >= memory_tiles || !shared.gathered.has_all(slot)) {
          attend::mask_gathered(by_tiles(s), shared.gathered, slot, grid, rows, warp_row, lane);
        }
      } else if (!keys.unmasked(j, warp_row)) {
        attend::mask(by_tiles(s), keys, j, warp_row, lane);
      }
      shared.key_ring.release(key_tiles + j, thread);
      const auto rescaling = softmax.update(by_tiles(s), p.scale_log2);
      if (kGathered && j + 1 == memory_tiles) of_memory = softmax;
      return rescaling;
    };

    if (tiles == 0) {
      shared.query_ring.release(row_tiles, thread);
    } else {
      shared.key_ring.wait_for_tile(key_tiles);
      ptx::fence_async_proxy();
      turns.wait();
      ptx::fence_accumulators(s);
      ptx::wgmma_fence();
      multiply_keys<dtype, kDim>(s, query, key_of(0));
      turns.give();
      ptx::wgmma_wait<0>();
      weigh(0);
      shared.value_ring.wait_for_tile(key_tiles);
      weights.template round<dtype>(s);
#pragma unroll 1
      for (int j = 1; j < tiles; ++j) {
        shared.key_ring.wait_for_tile(key_tiles + j);
        ptx::fence_async_proxy();
        turns.wait();
        ptx::fence_accumulators(s);
        ptx::fence_accumulators(out);
        weights.fence();
        ptx::wgmma_fence();
        multiply_keys<dtype, kDim>(s, query, key_of(j));
        multiply_values<dtype, kDim>(out, weights, value_of(j - 1));
        turns.give();
        ptx::wgmma_wait<1>();
        const auto rescaling = weigh(j);
        // Waited for here, although only the next products need it: ptxas moves the wait
        // for the products up, before the exponentials, unless a loop lies between.
        shared.value_ring.wait_for_tile(key_tiles + j);
        ptx::wgmma_wait<0>();
        ptx::fence_accumulators(out);
        if (rescaling.is_needed()) rescaling.apply(by_tiles(out));
        weights.fence();
        shared.value_ring.release(key_tiles + j - 1, thread);
        weights.template round<dtype>(s);
      }
      ptx::fence_async_proxy();
      ptx::fence_accumulators(out);
      weights.fence();
      ptx::wgmma_fence();
      multiply_values<dtype, kDim>(out, weights, value_of(tiles - 1));
      ptx::wgmma_wait<0>();
      ptx::fence_accumulators(out);
      weights.fence();
      shared.value_ring.release(key_tiles + tiles - 1, thread);
    }
    key_tiles += tiles;
    ++row_tiles;
    if constexpr (kGathered) attend::store_memory_lse(grid, rows, of_memory, warp_row);
    attend::store_result<dtype, kKind, kDim>(grid, rows, by_tiles(out), softmax, warp_tile,
                                             warp_row);
  });
  turns.end();
}

template <DType dtype, int kDim, KeyKind kKind>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    attend_forward_sm90_kernel(const __grid_constant__ ForwardGrid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& shared = sm90::aligned_shared<typename Shape<kDim>::Shared>();
  if (threadIdx.x == 0) {
    shared.query_ring.init();
    shared.key_ring.init();
    shared.value_ring.init();
  }
  __syncthreads();
  ptx::wait_for_earlier_launches();
  const int thread = static_cast<int>(threadIdx.x) % sm90::kWarpgroupThreads;
  const int warpgroup = sm90::warpgroup_of_thread();
  if (warpgroup == 0) {
    ptx::decrease_registers<sm90::kProducerRegisters>();
    produce<kDim, kKind>(shared, grid, thread);
  } else {
    ptx::increase_registers<sm90::kConsumerRegisters>();
    consume<dtype, kDim, kKind>(shared, grid, warpgroup - 1, thread);
  }
#endif
}

}  // namespace h2o_prefill::attend_sm90
