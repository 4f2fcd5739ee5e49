// Reductions over the lanes of a warp; every lane gets the result.
#pragma once

#include <cstdint>

namespace h2o_prefill::warp {

__device__ __forceinline__ float max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, i));
  return x;
}

__device__ __forceinline__ float sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, i);
  return x;
}

__device__ __forceinline__ uint32_t sum(uint32_t x) { return __reduce_add_sync(0xFFFFFFFFU, x); }

}  // namespace h2o_prefill::warp
