// The functions that translated PTX calls (see ptx_to_cpp.py): instructions that take part in the
// emulation, and arithmetic that C++ has not.
//
// Products of warpgroups are finished when they are issued: whether a kernel waits for them is
// tested on its sources (hopper.h) and on its machine code.
#pragma once

#include <sanitizer/asan_interface.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda_emulation/cuda.h"
#include "kernels/cuda/ptx_sm90.cuh"

namespace cuda_emulation::ptx_isa {

using hopper::Major;

template <size_t bytes>
struct alignas(8) Bytes {
  unsigned char values[bytes];
};

// Rounds to nearest even; to integers towards zero, NaN to 0, what is too large to the largest.
template <typename To, typename From>
To convert(From x) {
  if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    if (std::isnan(x)) return 0;
    const From most = std::ldexp(From{1}, std::numeric_limits<To>::digits);
    if (x >= most) return std::numeric_limits<To>::max();
    if (x < (std::is_signed_v<To> ? -most : 0)) return std::numeric_limits<To>::min();
  }
  return static_cast<To>(x);
}

// Shifts of as many bits as there are, or more, leave none but the sign.
template <typename T>
T shift_left(T x, uint32_t bits) {
  return bits < 8 * sizeof(T) ? static_cast<T>(x << bits) : T{0};
}
template <typename T>
T shift_right(T x, uint32_t bits) {
  return static_cast<T>(bits < 8 * sizeof(T) ? x >> bits : x < 0 ? -1 : 0);
}

// Of floats, the number where one is NaN.
template <typename T>
T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return b < a ? b : a;
}
template <typename T>
T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a < b ? b : a;
}

// A division by 0 has some result and is no trap: the compiler may divide before it knows.
template <typename T>
T divide(T a, T b) {
  return b == 0 ? static_cast<T>(-1) : a / b;
}
template <typename T>
T remainder(T a, T b) {
  return b == 0 ? a : a % b;
}

inline int64_t widen(int32_t x) { return x; }
inline uint64_t widen(uint32_t x) { return x; }

inline uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

inline uint32_t shared_begin() { return shared_address(shared_memory()); }

template <typename T, int count>
T* memory(uint64_t address, Site site) {
  auto* const pointer = reinterpret_cast<T*>(address);
  check_alignment("memory", pointer, sizeof(T) * count, site);
  if (__asan_region_is_poisoned(pointer, sizeof(T) * count)) {
    fail_at(site, "%zu bytes at %p that are nobody's", sizeof(T) * count, pointer);
  }
  return pointer;
}

template <typename T, int count>
T* shared_memory(uint32_t address, Site site) {
  const size_t bytes = sizeof(T) * count;
  unsigned char* const pointer = at_shared_address("shared memory", address, bytes, site);
  check_alignment("shared memory", pointer, bytes, site);
  return reinterpret_cast<T*>(pointer);
}

inline void bar_sync(uint32_t barrier, Site site) {
  if (barrier != 0) fail_at(site, "bar.sync %u of all threads", barrier);
  block_barrier(site);
}
inline void bar_sync(uint32_t barrier, uint32_t threads, Site site) {
  hopper::named_barrier_sync(static_cast<int>(barrier), static_cast<int>(threads), site);
}
inline void bar_arrive(uint32_t barrier, uint32_t threads, Site site) {
  hopper::named_barrier_arrive(static_cast<int>(barrier), static_cast<int>(threads), site);
}

// Of `present` bytes, and zeros after them.
inline void cp_async(uint32_t to, uint64_t from, uint32_t bytes, uint32_t present, Site site) {
  if (bytes != 16 || (present != 0 && present != 16)) {
    fail_at(site, "cp.async of %u bytes of %u", present, bytes);
  }
  unsigned char* const shared = shared_memory<unsigned char, 16>(to, site);
  h2o_prefill::ptx::cp_async_16(shared, reinterpret_cast<const void*>(from), present != 0, site);
}
inline void cp_async_commit(Site) { copies().commit(); }
inline void cp_async_wait(uint32_t pending, Site) { copies().wait(static_cast<int>(pending)); }

inline uint64_t* mbarrier_at(uint32_t address, Site site) {
  return shared_memory<uint64_t, 1>(address, site);
}
inline void mbarrier_init(uint32_t address, uint32_t count, Site site) {
  hopper::mbarrier_init(mbarrier_at(address, site), count, site);
}
inline void mbarrier_arrive(uint32_t address, Site site) {
  hopper::mbarrier_arrive(mbarrier_at(address, site), site);
}
inline void cp_async_mbarrier_arrive(uint32_t address, Site site) {
  hopper::cp_async_mbarrier_arrive(mbarrier_at(address, site), site);
}
// Waits once, so that others go on.
inline bool mbarrier_try_wait(uint32_t address, uint32_t parity, Site site) {
  uint64_t* const barrier = mbarrier_at(address, site);
  if (hopper::mbarrier_try_wait(barrier, parity, site)) return true;
  wait_for("mbarrier.try_wait", barrier, site);
  return hopper::mbarrier_try_wait(barrier, parity, site);
}
inline void fence_proxy_async(Site) { hopper::fence_async_proxy(); }

template <int registers>
void wgmma(const hopper::Operands& operands, float (&c)[registers], bool add, Site site) {
  const auto fence = [&] {
    if (!operands.a_registers) return;
    hopper::fence_operand(*reinterpret_cast<const uint32_t (*)[4]>(operands.a_registers), site);
  };
  fence();
  hopper::wgmma_fence();
  hopper::wgmma("wgmma", operands, c, add, site);
  hopper::wgmma_commit();
  hopper::wgmma_wait(0, site);
  fence();
}

// Lanes take the value of another one, their own where that is not in their part of the warp, whose
// width c has.
enum class Shuffle { up, bfly, idx };

template <Shuffle mode>
void shuffle(uint32_t& to, bool& in_range, uint32_t value, uint32_t b, uint32_t c, uint32_t mask,
             Site site) {
  constexpr auto source = mode == Shuffle::up     ? lane_above
                          : mode == Shuffle::bfly ? lane_of_xor
                                                  : lane_of_index;
  const int operand = static_cast<int>(b & 31), width = kWarpSize - static_cast<int>(c >> 8 & 31);
  const int lane = thread_index() % kWarpSize;
  to = cuda_emulation::shuffle<source>("shfl.sync", mask, value, operand, width, site);
  in_range = mode == Shuffle::idx || operand == 0 || source(lane, operand, width) != lane;
}

inline uint32_t ballot(bool predicate, uint32_t mask, Site site) {
  return vote("vote.sync", mask, predicate, site);
}

}  // namespace cuda_emulation::ptx_isa

using namespace cuda_emulation::ptx_isa;
using cuda_emulation::Site;
using h2o_prefill::DType;
namespace ptx = h2o_prefill::ptx;
