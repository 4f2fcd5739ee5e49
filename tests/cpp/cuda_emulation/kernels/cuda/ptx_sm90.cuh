// Stands in for csrc/kernels/cuda/ptx_sm90.cuh: the same functions with the semantics of the PTX
// ISA.
#pragma once

#include "cuda_emulation/hopper.h"
#include "kernels/cuda/ptx.cuh"

namespace h2o_prefill::ptx {

using Mbarrier = uint64_t;

inline void mbarrier_init(Mbarrier* barrier, uint32_t count, Site site = Site::here()) {
  cuda_emulation::hopper::mbarrier_init(barrier, count, site);
}

inline void mbarrier_arrive(Mbarrier* barrier, Site site = Site::here()) {
  cuda_emulation::hopper::mbarrier_arrive(barrier, false, site);
}

inline void cp_async_mbarrier_arrive(Mbarrier* barrier, Site site = Site::here()) {
  cuda_emulation::hopper::mbarrier_arrive(barrier, true, site);
}

inline bool mbarrier_try_wait(Mbarrier* barrier, uint32_t parity, Site site = Site::here()) {
  return cuda_emulation::hopper::mbarrier_has_ended(barrier, parity, site);
}

inline void mbarrier_wait(Mbarrier* barrier, uint32_t parity, Site site = Site::here()) {
  cuda_emulation::hopper::mbarrier_wait(barrier, parity, site);
}

inline void named_barrier_sync(int barrier, int threads, Site site = Site::here()) {
  cuda_emulation::hopper::named_barrier("named_barrier_sync", barrier, threads, true, site);
}

inline void named_barrier_arrive(int barrier, int threads, Site site = Site::here()) {
  cuda_emulation::hopper::named_barrier("named_barrier_arrive", barrier, threads, false, site);
}

template <int registers>
void decrease_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
}
template <int registers>
void increase_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
}

inline void fence_async_proxy() { cuda_emulation::hopper::fence_async_proxy(); }

inline void wgmma_fence() { cuda_emulation::hopper::wgmma_fence(); }

inline void wgmma_commit() { cuda_emulation::hopper::wgmma_commit(); }

template <int pending>
void wgmma_wait(Site site = Site::here()) {
  static_assert(pending >= 0);
  cuda_emulation::hopper::wgmma_wait(pending, site);
}

template <int n>
void fence_accumulators(float (&)[n]) {}

inline void fence_operand(uint32_t (&a)[4], Site site = Site::here()) {
  cuda_emulation::hopper::fence_operand(a, site);
}

template <DType dtype>
void wgmma_m64n128k16(float (&c)[64], uint64_t a, uint64_t b, bool add, Site site = Site::here()) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  using cuda_emulation::hopper::Major;
  cuda_emulation::hopper::wgmma("wgmma_m64n128k16", {dtype, 128, a, nullptr, b, Major::kColumns}, c,
                                add, site);
}

template <DType dtype, int registers>
void wgmma_rows_of_b(float (&c)[registers], const uint32_t (&a)[4], uint64_t b,
                     Site site = Site::here()) {
  static_assert(dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  static_assert(registers == 32 || registers == 64);
  using cuda_emulation::hopper::Major;
  cuda_emulation::hopper::wgmma("wgmma_rows_of_b", {dtype, 2 * registers, 0, a, b, Major::kRows}, c,
                                true, site);
}

}  // namespace h2o_prefill::ptx
