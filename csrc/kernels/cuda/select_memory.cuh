// Selection without a sort: the score of the last candidate that is taken is found bit by bit, then
// one stable compaction writes what is above it. A CTA of 32 warps has a unit.
#pragma once

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/select_memory.h"
#include "kernels/cuda/warp.cuh"

namespace h2o_prefill::select {

constexpr int kWarps = 32;
constexpr int kThreads = 32 * kWarps;
constexpr int kCounts = 3;
// Two buffers in turns, so that one barrier a step is enough.
constexpr int kSharedBytes = 2 * kCounts * kWarps * static_cast<int>(sizeof(uint32_t));

// An unsigned number that orders as the score does, never 0.
__device__ __forceinline__ uint32_t order_key(float score) {
  constexpr uint32_t kLowestFinite = 0x00800000U;  // the key of -FLT_MAX
  if (score != score) return kLowestFinite;
  const uint32_t bits = __float_as_uint(score + 0.0F);  // -0 becomes 0
  return bits & 0x80000000U ? ~bits : bits | 0x80000000U;
}

// The candidates of one unit, by number: rising positions. No history is longer than an int32
// counts, nor is a set.
struct Candidates {
  const int32_t* memory;
  const float* scores;
  uint32_t members;
  uint32_t count;
  int32_t chunk_begin;
  int32_t sink_end;
  int32_t local_begin;
  int32_t scores_length;

  __device__ __forceinline__ Candidates(const SelectMemoryParams& p, int64_t unit,
                                        const MemoryBudget& budget)
      : memory(p.from.of_unit(unit)),
        scores(p.scores + unit * p.scores_stride),
        members(static_cast<uint32_t>(p.from.width)),
        count(static_cast<uint32_t>(p.candidates())),
        chunk_begin(static_cast<int32_t>(p.chunk_begin)),
        sink_end(static_cast<int32_t>(budget.sink_end(p.chunk_end))),
        local_begin(static_cast<int32_t>(budget.local_begin(p.chunk_end))),
        scores_length(static_cast<int32_t>(p.scores_length)) {}

  // The position of a candidate; -1 for what has no claim to one of the heavy places. Without
  // branches, so that a thread's loads do not wait for one another.
  __device__ __forceinline__ int32_t position(uint32_t i) const {
    const bool is_member = i < members;
    const int32_t member = is_member ? memory[i] : -1;
    const int32_t position = is_member ? member : chunk_begin + static_cast<int32_t>(i - members);
    const int32_t end = is_member ? min(chunk_begin, local_begin) : local_begin;
    return (position >= sink_end) & (position < end) & (i < count) ? position : -1;
  }
  __device__ __forceinline__ float score(int32_t position) const {
    return position >= 0 && position < scores_length ? scores[position] : 0.0F;
  }
  __device__ __forceinline__ static uint32_t key(int32_t position, float score) {
    return position < 0 ? 0 : order_key(score);
  }
};

// Sums the counts of a CTA's warps: a lane has the counts of one. One barrier a call.
class CtaCounter {
 public:
  // Adds the counts of all warps. before: of the warps below this thread's alone, if it is asked
  // for.
  template <int kUsed>
  __device__ __forceinline__ void sum(uint32_t (&counts)[kUsed], uint32_t* before = nullptr) {
    uint32_t* const buffer = ptx::dynamic_shared<uint32_t>() + buffer_ * kCounts * kWarps;
    buffer_ ^= 1;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) {
      for (int d = 0; d < kUsed; ++d) buffer[d * kWarps + warp] = counts[d];
    }
    __syncthreads();
    for (int d = 0; d < kUsed; ++d) {
      const uint32_t of_warp = buffer[d * kWarps + lane];
      counts[d] = warp::sum(of_warp);
      if (before) before[d] = warp::sum(lane < warp ? of_warp : 0U);
    }
  }

 private:
  int buffer_ = 0;
};

__device__ __forceinline__ uint32_t count_lanes(bool flag) {
  return static_cast<uint32_t>(__popc(__ballot_sync(0xFFFFFFFFU, flag)));
}

// kRows > 0: each thread keeps the keys of up to kRows candidates, kThreads apart, in registers.
// kRows = 0: any number of candidates, whose scores are read again for every digit.
template <int kRows>
__device__ __forceinline__ void select_memory(const SelectMemoryParams& p, int64_t unit) {
  const uint32_t thread = threadIdx.x;
  const MemoryBudget budget = p.budget_of(unit);
  const Candidates candidates(p, unit, budget);
  int32_t* selected = p.selected + unit * p.width;
  CtaCounter counter;

  constexpr int kKept = kRows > 0 ? kRows : 1;
  uint32_t keys[kKept];
  int32_t positions[kKept];
  if constexpr (kRows > 0) {
// All loads of one kind are on their way at once.
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) positions[r] = candidates.position(r * kThreads + thread);
    float scores[kRows];
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) scores[r] = candidates.score(positions[r]);
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) keys[r] = Candidates::key(positions[r], scores[r]);
  }
  const uint32_t rows = divide_up<uint32_t>(candidates.count, kThreads);
  // Calls with(key, position) for this thread's candidate of every row.
  const auto for_each_row = [&](auto&& with) {
    if constexpr (kRows > 0) {
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r) {
        if (r < rows) with(keys[r], positions[r]);
      }
    } else {
      for (uint32_t r = 0; r < rows; ++r) {
        const int32_t position = candidates.position(r * kThreads + thread);
        with(Candidates::key(position, candidates.score(position)), position);
      }
    }
  };

  // The largest threshold that heavy_budget keys reach; 1, so all, where there are fewer. Two bits
  // a step: how many keys reach each of the three next higher thresholds.
  const uint32_t heavy = budget.heavy_budget < candidates.count
                             ? static_cast<uint32_t>(budget.heavy_budget)
                             : candidates.count;
  uint32_t threshold = 1;
  if (heavy > 0) {
    uint32_t prefix = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
      const uint32_t step = 1U << shift;
      uint32_t counts[kCounts] = {};
      for_each_row([&](uint32_t key, int32_t) {
#pragma unroll
        for (int d = 0; d < kCounts; ++d) {
          counts[d] += count_lanes(key >= prefix + static_cast<uint32_t>(d + 1) * step);
        }
      });
      counter.sum(counts);
      uint32_t reached = 0;
      for (int d = 0; d < kCounts; ++d) {
        if (counts[d] >= heavy) {
          prefix += step;
          reached = counts[d];
        }
      }
      if (reached == heavy) break;  // keys at or above the prefix are the answer
    }
    if (prefix > 0) threshold = prefix;
  }

  // Takes keys above the threshold, and the first of those on it that there is room for.
  uint32_t above[1] = {};
  for_each_row([&](uint32_t key, int32_t) { above[0] += count_lanes(key > threshold); });
  counter.sum(above);
  const uint32_t room_for_ties = heavy - above[0];

  const auto sink_end = static_cast<uint32_t>(candidates.sink_end);
  const auto local_begin = static_cast<uint32_t>(candidates.local_begin);
  for (uint32_t i = thread; i < sink_end; i += kThreads) selected[i] = static_cast<int32_t>(i);
  const uint32_t lower_lanes = (1U << (thread % 32)) - 1U;
  uint32_t end = sink_end;  // of the written members
  uint32_t ties = 0;        // seen in earlier rows
  if (heavy > 0) {
    for_each_row([&](uint32_t key, int32_t position) {
      const uint32_t above_lanes = __ballot_sync(0xFFFFFFFFU, key > threshold);
      const uint32_t tied_lanes = __ballot_sync(0xFFFFFFFFU, key == threshold);
      uint32_t counts[2] = {static_cast<uint32_t>(__popc(above_lanes)),
                            static_cast<uint32_t>(__popc(tied_lanes))};
      uint32_t before[2];
      counter.sum(counts, before);
      // Ties before this thread's candidate, and how many of them are taken.
      const uint32_t tied_before =
          ties + before[1] + static_cast<uint32_t>(__popc(tied_lanes & lower_lanes));
      const uint32_t taken_in_earlier_rows = min(ties, room_for_ties);
      const uint32_t taken_before = min(tied_before, room_for_ties);
      if (key > threshold || (key == threshold && tied_before < room_for_ties)) {
        const uint32_t above_before =
            before[0] + static_cast<uint32_t>(__popc(above_lanes & lower_lanes));
        selected[end + above_before + taken_before - taken_in_earlier_rows] = position;
      }
      ties += counts[1];
      end += counts[0] + min(ties, room_for_ties) - taken_in_earlier_rows;
    });
  }
  const auto local_end = static_cast<uint32_t>(p.chunk_end);
  for (uint32_t i = local_begin + thread; i < local_end; i += kThreads) {
    selected[end + i - local_begin] = static_cast<int32_t>(i);
  }
  end += local_end - local_begin;
  const auto width = static_cast<uint32_t>(p.width);
  for (uint32_t i = end + thread; i < width; i += kThreads) selected[i] = -1;
}

}  // namespace h2o_prefill::select
