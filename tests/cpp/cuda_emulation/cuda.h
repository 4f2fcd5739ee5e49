// The parts of the CUDA language that kernels use, for a host compiler: g++ -include
// cuda_emulation/cuda.h.
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

// Instructions of sm_90a alone are emulated too.
#define __CUDA_ARCH_FEAT_SM90_ALL

// Called as a linker finds it, so that another function of its name can take its place.
#if defined(__clang__)
#define __global__ __attribute__((noinline))
#else
#define __global__ __attribute__((noipa))
#endif
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

inline unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }

constexpr int min(int a, int b) { return b < a ? b : a; }
constexpr unsigned int min(unsigned int a, unsigned int b) { return b < a ? b : a; }
constexpr int max(int a, int b) { return a < b ? b : a; }
constexpr int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
constexpr int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }

// Vectors that are loaded and stored in one piece, aligned to their size.
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
