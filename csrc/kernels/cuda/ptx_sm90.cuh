// PTX instructions of sm_90a that the kernels use, one function each, beside ptx.cuh.
//
// They exist for sm_90a alone: a kernel's body stands between
//   #if defined(__CUDA_ARCH_FEAT_SM90_ALL) and #endif
// and is empty on other architectures. A warpgroup is 4 consecutive warps, the first one a multiple
// of 4; wgmma instructions are executed by all its threads, converged. Descriptors and accumulators
// are laid out as layout_sm90.h says.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill::ptx {

// A barrier in shared memory. Its phases are numbered from 0; a phase ends when `count` arrivals
// have come, and the next one begins. A thread that has waited for the end of a
// phase sees all writes before its arrivals.
using Mbarrier = uint64_t;

// Executed by one thread, before a block barrier.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)),
               "r"(count)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives when all cp_async_* that this thread has begun are finished; one of the barrier's
// `count`.
__device__ __forceinline__ void cp_async_mbarrier_arrive(Mbarrier* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier))
      : "memory");
}

// Whether the latest phase with this parity (number % 2) has ended; that with parity 1 has in a new
// barrier. May wait for it a while.
__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Barriers with numbers 1..15 of `threads` threads in whole warps. Arriving does not wait.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// From here on a thread of this warpgroup has `registers` registers, a multiple of 8: fewer than
// before, or more if others have given up theirs.
template <int registers>
__device__ __forceinline__ void decrease_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void increase_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(registers));
}

// wgmma reads shared memory through another proxy than loads, stores and cp_async_* use. Makes
// their writes that this thread knows of visible to the wgmma instructions that it issues.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Before the first wgmma, and before one whose accumulators were touched by anything else.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// Closes the group of the wgmma instructions issued since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most the `pending` latest groups are unfinished. This warp's part of the others is
// in the accumulators then, and nothing reads their operands for this warp any more.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across this line: to it they are
// registers like others, written when the wgmma was issued.
template <int n>
__device__ __forceinline__ void fence_accumulators(float (&c)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// The same for an operand that lies in registers: before the product is issued, so that the
// values are there, and after the wait, so that nothing else takes the registers before.
template <int n>
__device__ __forceinline__ void fence_operand(uint32_t (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Lists of accumulators as asm operands.
#define H2O_C8(c, i)                                                                          \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define H2O_C32(c, i) H2O_C8(c, i), H2O_C8(c, i + 8), H2O_C8(c, i + 16), H2O_C8(c, i + 24)
#define H2O_NAMES_0_31                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31"
#define H2O_NAMES_32_63                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
  "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63"

// c[64, 128] = a[64, 16] b[16, 128] if !add, else c += a b: sums in float32, issued and not waited
// for. Both operands are in shared memory, rows of a and columns of b contiguous. c is not to be
// touched before a wait.
template <DType dtype>
__device__ __forceinline__ void wgmma_m64n128k16(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
#define H2O_WGMMA(type)                                                                \
  asm volatile(                                                                        \
      "{\n"                                                                            \
      ".reg .pred p;\n"                                                                \
      "setp.ne.b32 p, %66, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" H2O_NAMES_0_31 \
      ", " H2O_NAMES_32_63                                                             \
      "}, %64, %65, p, 1, 1, 0, 0;\n"                                                  \
      "}\n"                                                                            \
      : H2O_C32(c, 0), H2O_C32(c, 32)                                                  \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (dtype == DType::kBFloat16) {
    H2O_WGMMA("bf16");
  } else {
    H2O_WGMMA("f16");
  }
#undef H2O_WGMMA
}

// c[64, columns] += a[64, 16] b[16, columns], issued and not waited for: 64 or 128 columns. a is in
// registers, each warp's 16 rows as for mma_m16n8k16, fenced; rows of b are contiguous in shared
// memory. Neither c nor a is to be touched before a wait.
template <DType dtype, int registers>
__device__ __forceinline__ void wgmma_rows_of_b(float (&c)[registers], const uint32_t (&a)[4],
                                                uint64_t b) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  static_assert(registers == 32 || registers == 64);
#define H2O_WGMMA_64(type)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" H2O_NAMES_0_31 \
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                   \
               : H2O_C32(c, 0)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define H2O_WGMMA_128(type)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" H2O_NAMES_0_31 \
               ", " H2O_NAMES_32_63 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"               \
               : H2O_C32(c, 0), H2O_C32(c, 32)                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (registers == 32 && dtype == DType::kBFloat16) {
    H2O_WGMMA_64("bf16");
  } else if constexpr (registers == 32) {
    H2O_WGMMA_64("f16");
  } else if constexpr (dtype == DType::kBFloat16) {
    H2O_WGMMA_128("bf16");
  } else {
    H2O_WGMMA_128("f16");
  }
#undef H2O_WGMMA_64
#undef H2O_WGMMA_128
}

#undef H2O_NAMES_32_63
#undef H2O_NAMES_0_31
#undef H2O_C32
#undef H2O_C8

}  // namespace h2o_prefill::ptx
