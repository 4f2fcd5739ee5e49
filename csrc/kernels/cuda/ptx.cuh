// Every PTX instruction that the kernels use, one function each, for sm_80 and up.
//
// Kernels touch shared memory, 16-bit elements and the tensor cores through these functions only:
// tests/cpp/cuda_emulation has a header of the same name that gives them on the host. Elements of
// 16 bits are uint16_t, two of them in a 32-bit register have the first one in the low half.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace h2o_prefill::ptx {

// The block's dynamic shared memory, the only one that kernels use; aligned to 128 bytes.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char h2o_dynamic_shared[];
  return reinterpret_cast<T*>(h2o_dynamic_shared);
}

// Waits until the launches before this one on its stream have ended and their writes can be
// read, and lets the blocks of the next one start. Called by all threads of a kernel that is
// launched `overlapped`, before they touch global memory; nothing happens below 9.0.
__device__ __forceinline__ void wait_for_earlier_launches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "griddepcontrol.wait;\n"
      "griddepcontrol.launch_dependents;\n" ::
          : "memory");
#endif
}

// The address of `pointer` in the shared window.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Begins an asynchronous copy of 16 bytes, both addresses multiples of 16, past L1. Where !valid,
// zeros are written and `global` is not read (but must be a pointer).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
      : "memory");
}

// Closes the group of the copies that this thread began since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most the `pending` latest groups of this thread are unfinished. The data is
// visible to this thread then, and to the others after a barrier.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane i names row i % 8, 16 bytes that begin at a
// multiple of 16, of matrix i / 8. r[m] of lane i has of matrix m
//   row i / 4, columns 2 (i % 4) and 2 (i % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, transposed: r[m] of lane i has of matrix m
//   rows 2 (i % 4) and 2 (i % 4) + 1, column i / 4.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], sums in float32. With g = lane / 4 and t = lane % 4:
//   a[0]: row g,     columns 2t, 2t + 1      a[2]: row g,     columns 2t + 8, 2t + 9
//   a[1]: row g + 8, columns 2t, 2t + 1      a[3]: row g + 8, columns 2t + 8, 2t + 9
//   b0: rows 2t, 2t + 1, column g            b1: rows 2t + 8, 2t + 9, column g
//   c[0], c[1]: row g, columns 2t, 2t + 1    c[2], c[3]: row g + 8, columns 2t, 2t + 1
template <DType dtype>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  if constexpr (dtype == DType::kBFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two floats as 16-bit elements, rounded to nearest even; `low` is the first element.
template <DType dtype>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  uint32_t pair;
  if constexpr (dtype == DType::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <DType dtype>
__device__ __forceinline__ float to_float(uint16_t x) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  if constexpr (dtype == DType::kBFloat16) return __uint_as_float(static_cast<uint32_t>(x) << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(y) : "h"(x));
  return y;
}

// Rounds to nearest even.
template <DType dtype>
__device__ __forceinline__ uint16_t from_float(float x) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  uint16_t y;
  if constexpr (dtype == DType::kBFloat16) {
    asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(y) : "f"(x));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(y) : "f"(x));
  }
  return y;
}

// 2^x within 2 ulp; subnormal results are 0, exp2(-inf) = 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace h2o_prefill::ptx
