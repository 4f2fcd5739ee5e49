// What kernels use of the CUDA language, for a host compiler: g++ -include cuda_emulation/cuda.h.
//
// Shared memory, tensor cores and asynchronous copies are in kernels/cuda/ptx.cuh beside this file,
// which stands in for the header of that name, as launch.cuh and cuda_runtime_api.h do: this folder
// comes before csrc in the include path.
#pragma once

#include <math.h>

#include <bit>
#include <cstdint>

#include "cuda_emulation/scheduler.h"
#include "cuda_emulation/warp.h"

// What sm_90a alone has is emulated too.
#define __CUDA_ARCH_FEAT_SM90_ALL

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#ifndef __restrict__
#define __restrict__ __restrict
#endif

inline void __syncthreads(cuda_emulation::Site site = cuda_emulation::Site::here()) {
  cuda_emulation::block_barrier(site);
}

inline int __popc(unsigned int x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned int>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

inline unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

#define CUDA_EMULATION_MIN_MAX(T)                     \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
CUDA_EMULATION_MIN_MAX(int)
CUDA_EMULATION_MIN_MAX(unsigned int)
CUDA_EMULATION_MIN_MAX(long)
CUDA_EMULATION_MIN_MAX(unsigned long)
CUDA_EMULATION_MIN_MAX(long long)
CUDA_EMULATION_MIN_MAX(unsigned long long)
#undef CUDA_EMULATION_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Only one thread runs at a time.
#define CUDA_EMULATION_ATOMICS(T)               \
  inline T atomicAdd(T* address, T value) {     \
    const T before = *address;                  \
    *address = before + value;                  \
    return before;                              \
  }                                             \
  inline T atomicMax(T* address, T value) {     \
    const T before = *address;                  \
    *address = before < value ? value : before; \
    return before;                              \
  }                                             \
  inline T atomicMin(T* address, T value) {     \
    const T before = *address;                  \
    *address = value < before ? value : before; \
    return before;                              \
  }                                             \
  inline T atomicOr(T* address, T value) {      \
    const T before = *address;                  \
    *address = before | value;                  \
    return before;                              \
  }
CUDA_EMULATION_ATOMICS(int)
CUDA_EMULATION_ATOMICS(unsigned int)
CUDA_EMULATION_ATOMICS(unsigned long long)
#undef CUDA_EMULATION_ATOMICS

// Vectors that are loaded and stored in one piece, aligned to their size.
#define CUDA_EMULATION_VECTORS(T, name)                      \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };         \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };   \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_EMULATION_VECTORS(float, float)
CUDA_EMULATION_VECTORS(int, int)
CUDA_EMULATION_VECTORS(unsigned int, uint)
#undef CUDA_EMULATION_VECTORS
