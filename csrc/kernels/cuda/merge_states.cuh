// One warp fuses one row at a time.
#pragma once

#include "kernels/cuda/merge_states.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/softmax_state.h"

namespace h2o_prefill::merge {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// An element of a dtype in memory, and as a number.
template <DType dtype>
struct Element {
  using Stored = uint16_t;
  static __device__ __forceinline__ float load(uint16_t x) { return ptx::to_float<dtype>(x); }
  static __device__ __forceinline__ uint16_t store(float x) { return ptx::from_float<dtype>(x); }
};
template <>
struct Element<DType::kFloat32> {
  using Stored = float;
  static __device__ __forceinline__ float load(float x) { return x; }
  static __device__ __forceinline__ float store(float x) { return x; }
};

// kCount neighbours, moved at once.
template <typename Stored, int kCount>
struct alignas(kCount * sizeof(Stored)) Pack {
  Stored elements[kCount];
};

template <typename T>
__device__ __forceinline__ T* row_of(const HeadsView& view, int64_t b, int64_t h, int64_t t) {
  return static_cast<T*>(view.data) + b * view.stride_batch + h * view.stride_head +
         t * view.stride_row;
}

// kCount: elements that a lane moves at once; rows must be aligned to that.
template <DType dtype, int kCount>
__global__ void __launch_bounds__(kThreads)
    merge_states_kernel(__grid_constant__ const MergeStatesParams p) {
  using Stored = typename Element<dtype>::Stored;
  using Packed = Pack<Stored, kCount>;
  const uint32_t heads = static_cast<uint32_t>(p.out.heads);
  const uint32_t lists = static_cast<uint32_t>(p.out.batch) * heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (t >= p.out.length) return;
  for (uint32_t list = blockIdx.y; list < lists; list += gridDim.y) {
    const uint32_t b = list / heads;
    const uint32_t h = list % heads;
    const int64_t row = list * p.out.length + t;
    const MergeWeights weight = merge_weights(p.lse_a[row], p.lse_b[row]);
    const auto* a = reinterpret_cast<const Packed*>(row_of<Stored>(p.out_a, b, h, t));
    const auto* other = reinterpret_cast<const Packed*>(row_of<Stored>(p.out_b, b, h, t));
    auto* to = reinterpret_cast<Packed*>(row_of<Stored>(p.out, b, h, t));
    for (int64_t i = lane; i < p.out.dim / kCount; i += 32) {
      const Packed from_a = a[i];
      const Packed from_b = other[i];
      Packed merged;
#pragma unroll
      for (int d = 0; d < kCount; ++d) {
        // An empty side is left out, not multiplied by 0.
        const float x =
            weight.a == 0.0F ? 0.0F : Element<dtype>::load(from_a.elements[d]) * weight.a;
        const float y =
            weight.b == 0.0F ? 0.0F : Element<dtype>::load(from_b.elements[d]) * weight.b;
        merged.elements[d] = Element<dtype>::store(x + y);
      }
      to[i] = merged;
    }
    if (lane == 0) p.lse[row] = weight.lse;
  }
}

}  // namespace h2o_prefill::merge
