// What lanes of a warp make together; every one of them gets the result.
#pragma once

namespace h2o_prefill::warp {

constexpr int kAll = 32;
// The lanes of a row of an accumulator.
constexpr int kQuad = 4;

template <int kLanes = kAll>
__device__ __forceinline__ float max(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, i));
  return x;
}

template <int kLanes = kAll>
__device__ __forceinline__ float sum(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, i);
  return x;
}

}  // namespace h2o_prefill::warp
