// Reductions over the lanes of a warp; every lane gets the result.
#pragma once

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

}  // namespace h2o_prefill::warp
