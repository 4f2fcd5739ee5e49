// The kernels of sm_90a share a block of three warpgroups: the first one copies tiles into rings of
// buffers, the other two multiply them, 64 rows of the result each.
//
// A buffer has two barriers: `full` ends a phase when a tile has come, `empty` when it has been
// used. The multiplying warpgroups issue their products by turns, so that one is at its
// exponentials while the other one's products are computed.
#pragma once

#include "kernels/cuda/layout_sm90.h"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tile.cuh"

namespace h2o_prefill::sm90 {

constexpr int kWarpgroupThreads = layout_sm90::kWarpgroupThreads;
constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;

constexpr int kGroupRows = 64;  // of a product of one warpgroup
constexpr int kBlockRows = kConsumers * kGroupRows;

// Copying needs few of a thread's 168 registers; the rest goes to the accumulators.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * 168);

constexpr int kAlignment = layout_sm90::kSlabGroupBytes;
constexpr int kMaxSharedBytes = 227 * 1024;

// The block asks for so much shared memory to have a `Shared` at a multiple of kAlignment.
template <typename Shared>
constexpr int shared_bytes() {
  static_assert(sizeof(Shared) + kAlignment <= kMaxSharedBytes);
  return sizeof(Shared) + kAlignment;
}

template <typename Shared>
__device__ __forceinline__ Shared& aligned_shared() {
  auto* const memory = ptx::dynamic_shared<unsigned char>();
  const uint32_t gap = -ptx::shared_address(memory) % kAlignment;
  return *reinterpret_cast<Shared*>(memory + gap);
}

// The thread's warpgroup: the same in all lanes, and known to be.
__device__ __forceinline__ int warpgroup_of_thread() {
  return __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}

// The buffer of the ring that tile number i goes to, and how often it was used before.
template <int kStages>
struct Turn {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ explicit Turn(int i)
      : stage(static_cast<uint32_t>(i) % kStages), parity(static_cast<uint32_t>(i) / kStages % 2) {}
};

// One arrival for the 32 lanes.
__device__ __forceinline__ void arrive_of_warp(ptx::Mbarrier* barrier, int thread) {
  __syncwarp();
  if (thread % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// The barriers of a ring. Full: the copies of every thread of the first warpgroup, and an arrival
// of each of its warps for what they store. Empty: an arrival of each warp that multiplies.
template <int kStages>
struct RingBarriers {
  ptx::Mbarrier full[kStages];
  ptx::Mbarrier empty[kStages];

  // Executed by one thread, before a block barrier.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], kWarpgroupThreads + kWarpgroupWarps);
      ptx::mbarrier_init(&empty[i], kConsumers * kWarpgroupWarps);
    }
  }
  // Called by the producer before it copies tile i, and after.
  __device__ __forceinline__ void wait_for_space(int i) {
    const Turn<kStages> turn(i);
    ptx::mbarrier_wait(&empty[turn.stage], turn.parity ^ 1);
  }
  __device__ __forceinline__ void arrive_full(int i, int thread) {
    const int stage = Turn<kStages>(i).stage;
    ptx::cp_async_mbarrier_arrive(&full[stage]);
    arrive_of_warp(&full[stage], thread);
  }
  // Called by the consumers before they use tile i, and after.
  __device__ __forceinline__ void wait_for_tile(int i) {
    const Turn<kStages> turn(i);
    ptx::mbarrier_wait(&full[turn.stage], turn.parity);
  }
  __device__ __forceinline__ void release(int i, int thread) {
    arrive_of_warp(&empty[Turn<kStages>(i).stage], thread);
  }
};

// The consumers' turns: warpgroup g waits at named barrier 1 + g, and the first one begins.
struct Turns {
  static constexpr int kBothGroups = kConsumers * kWarpgroupThreads;
  int group;

  __device__ __forceinline__ void begin() const {
    if (group == 1) give();
  }
  __device__ __forceinline__ void wait() const { ptx::named_barrier_sync(1 + group, kBothGroups); }
  __device__ __forceinline__ void give() const {
    ptx::named_barrier_arrive(2 - group, kBothGroups);
  }
  // After the last give(); one is left to the first warpgroup.
  __device__ __forceinline__ void end() const {
    if (group == 0) wait();
  }
};
constexpr int kFirstFreeBarrier = 1 + kConsumers;

// How many of the numbers [0, count) a condition holds for, which the lanes of a warp share. Loads
// of kUnroll steps are on their way together.
template <int kUnroll, typename Holds>
__device__ __forceinline__ int count_if(int count, int lane, const Holds& holds) {
  int total = 0;
#pragma unroll kUnroll
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    total += __popc(__ballot_sync(0xFFFFFFFFU, i < count && holds(i)));
  }
  return total;
}

// The row of a tile that a lane looks up. The lanes of a warp look up those that the warp copies: 4
// of each 16.
__device__ __forceinline__ int row_of_lane(int thread) {
  return thread / 32 * 4 + thread % 4 + thread % 32 / 4 * 16;
}

// Begins to copy a tile of kTileRows rows of a head to slabs of kSlabRows rows, by the first
// warpgroup, 8 lanes a row: row_of_lane(thread) of the tile is `row` of the head. Zeros where that
// is negative and after the end of rows.
template <int kTileRows, int kSlabs, int kSlabRows = kTileRows>
__device__ __forceinline__ void copy_rows(uint16_t* slabs, const tile::HeadRows& rows, int row,
                                          int thread) {
  constexpr int kPassRows = kWarpgroupThreads / layout_sm90::kSlabUnits;
  const int unit = thread % layout_sm90::kSlabUnits;
  const int to = layout_sm90::slab_unit(thread / layout_sm90::kSlabUnits, unit, kSlabRows);
  uint16_t* const slab = slabs + to * tile::kUnitElements;
  const char* const data = reinterpret_cast<const char*>(rows.data + unit * tile::kUnitElements);
  // Less than 2^31, so that an address is one instruction: 32 by 32 bits, added to 64. Where a loop
  // knew it from before, the compiler would multiply 64 bits.
  const int stride = tile::recomputed(static_cast<int>(rows.stride * sizeof(uint16_t)));
#pragma unroll
  for (int i = 0; i < kTileRows / kPassRows; ++i) {
    const int from = __shfl_sync(0xFFFFFFFFU, row, thread % 32 / layout_sm90::kSlabUnits + 4 * i);
    const char* const source = data + static_cast<int64_t>(from) * stride;
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const int column = s * layout_sm90::kSlabColumns;
      const bool valid = from >= 0 && unit + s * layout_sm90::kSlabUnits < rows.units;
      ptx::cp_async_16(slab + column * kSlabRows + i * kPassRows * layout_sm90::kSlabColumns,
                       source + s * layout_sm90::kSlabRowBytes, valid);
    }
  }
}

}  // namespace h2o_prefill::sm90
