// Shuffles, votes, sums and __syncwarp().
#pragma once

#include "cuda_emulation/scheduler.h"

namespace cuda_emulation {

constexpr unsigned int kFullMask = 0xFFFFFFFFU;

inline void check_mask(unsigned int mask, Site site) {
  if (mask == kFullMask) return;
  fail_at(site, "a collective of some lanes only, mask %08x", mask);
}

template <typename T>
struct Shuffle {
  T value;
  int operand;
  int width;
  T result;
};

// Every lane gets the value of lane source(lane, operand, width), its own where that is none of its
// `width` lanes.
template <int (*source)(int lane, int operand, int width), typename T>
T shuffle(const char* name, unsigned int mask, T value, int operand, int width, Site site) {
  check_mask(mask, site);
  Shuffle<T> shuffle{value, operand, width, value};
  warp_collective(
      name, &shuffle,
      [](void* const* arguments) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
          auto* mine = static_cast<Shuffle<T>*>(arguments[lane]);
          const int from = source(lane, mine->operand, mine->width);
          mine->result = static_cast<Shuffle<T>*>(arguments[from])->value;
        }
      },
      site);
  return shuffle.result;
}

inline int lane_of_index(int lane, int operand, int width) {
  return lane / width * width + (operand & (width - 1));
}
inline int lane_of_xor(int lane, int operand, int width) {
  const int from = lane ^ operand;
  return from < (lane / width + 1) * width ? from : lane;
}
inline int lane_above(int lane, int operand, int width) {
  return lane % width >= operand ? lane - operand : lane;
}

struct Vote {
  bool predicate;
  unsigned int ballot;
};

inline unsigned int vote(const char* name, unsigned int mask, bool predicate, Site site) {
  check_mask(mask, site);
  Vote vote{predicate, 0};
  warp_collective(
      name, &vote,
      [](void* const* arguments) {
        unsigned int ballot = 0;
        for (int lane = 0; lane < kWarpSize; ++lane) {
          ballot |= static_cast<unsigned int>(static_cast<Vote*>(arguments[lane])->predicate)
                    << lane;
        }
        for (int lane = 0; lane < kWarpSize; ++lane) {
          static_cast<Vote*>(arguments[lane])->ballot = ballot;
        }
      },
      site);
  return vote.ballot;
}

inline unsigned int reduce_add(unsigned int value, unsigned int mask, Site site) {
  check_mask(mask, site);
  warp_collective(
      "redux.sync.add", &value,
      [](void* const* arguments) {
        unsigned int sum = 0;
        for (int lane = 0; lane < kWarpSize; ++lane) {
          sum += *static_cast<unsigned int*>(arguments[lane]);
        }
        for (int lane = 0; lane < kWarpSize; ++lane) {
          *static_cast<unsigned int*>(arguments[lane]) = sum;
        }
      },
      site);
  return value;
}

}  // namespace cuda_emulation

inline void __syncwarp(unsigned int mask = cuda_emulation::kFullMask,
                       cuda_emulation::Site site = cuda_emulation::Site::here()) {
  cuda_emulation::check_mask(mask, site);
  cuda_emulation::warp_collective("__syncwarp", nullptr, nullptr, site);
}

#define CUDA_EMULATION_SHUFFLE(function, operand, source)                                       \
  template <typename T>                                                                         \
  T function(unsigned int mask, T value, operand, int width = 32,                               \
             cuda_emulation::Site site = cuda_emulation::Site::here()) {                        \
    return cuda_emulation::shuffle<cuda_emulation::source>(#function, mask, value, from, width, \
                                                           site);                               \
  }
CUDA_EMULATION_SHUFFLE(__shfl_sync, int from, lane_of_index)
CUDA_EMULATION_SHUFFLE(__shfl_xor_sync, int from, lane_of_xor)
CUDA_EMULATION_SHUFFLE(__shfl_up_sync, unsigned int from, lane_above)
#undef CUDA_EMULATION_SHUFFLE

inline unsigned int __ballot_sync(unsigned int mask, int predicate,
                                  cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::vote("__ballot_sync", mask, predicate != 0, site);
}

inline int __any_sync(unsigned int mask, int predicate,
                      cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::vote("__any_sync", mask, predicate != 0, site) != 0;
}

inline unsigned int __reduce_add_sync(unsigned int mask, unsigned int value,
                                      cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::reduce_add(value, mask, site);
}
