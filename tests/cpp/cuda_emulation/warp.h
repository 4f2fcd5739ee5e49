// Shuffles, votes and __syncwarp().
#pragma once

#include "cuda_emulation/scheduler.h"

namespace cuda_emulation {

constexpr unsigned int kFullMask = 0xFFFFFFFFU;

inline void check_mask(unsigned int mask, Site site) {
  if (mask == kFullMask) return;
  fail("a collective of some lanes only, mask %08x (%s:%d)", mask, site.file, site.line);
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

}  // namespace cuda_emulation

inline void __syncwarp(unsigned int mask = cuda_emulation::kFullMask,
                       cuda_emulation::Site site = cuda_emulation::Site::here()) {
  cuda_emulation::check_mask(mask, site);
  cuda_emulation::warp_collective("__syncwarp", nullptr, nullptr, site);
}

template <typename T>
T __shfl_sync(unsigned int mask, T value, int lane, int width = 32,
              cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::shuffle<cuda_emulation::lane_of_index>("__shfl_sync", mask, value, lane,
                                                                width, site);
}

template <typename T>
T __shfl_xor_sync(unsigned int mask, T value, int lane_mask, int width = 32,
                  cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::shuffle<cuda_emulation::lane_of_xor>("__shfl_xor_sync", mask, value,
                                                              lane_mask, width, site);
}

template <typename T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32,
                 cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::shuffle<cuda_emulation::lane_above>("__shfl_up_sync", mask, value,
                                                             static_cast<int>(delta), width, site);
}

inline unsigned int __ballot_sync(unsigned int mask, int predicate,
                                  cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::vote("__ballot_sync", mask, predicate != 0, site);
}

inline int __any_sync(unsigned int mask, int predicate,
                      cuda_emulation::Site site = cuda_emulation::Site::here()) {
  return cuda_emulation::vote("__any_sync", mask, predicate != 0, site) != 0;
}
